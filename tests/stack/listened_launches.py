"""Launches of a training step, with the sockets that were listened on meanwhile, for tests of several files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pytest_trlcompat.launch import Launcher, LaunchResult
from tests.launch.listening import Listener, watching

from .listening_bodies import train_and_list

__all__ = ["ListenedLaunch", "launch_and_listen", "options_of"]


@dataclass(frozen=True)
class ListenedLaunch:
    """What a launch returned, and every socket that was listened on from its beginning to its end."""

    result: LaunchResult
    listeners: set[Listener]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What ``train_step`` returned on each rank."""
        return [value["step"] for value in self.result.values]


def options_of(strategy: str) -> dict[str, Any]:
    """Those with which the strategy shards the model of ``train_step``, which has no layers to wrap."""
    return {"auto_wrap_policy": "NO_WRAP"} if strategy.startswith("fsdp") else {}


def launch_and_listen(launcher: Launcher, strategy: str, **arguments: Any) -> ListenedLaunch:
    with watching(os.getpid()) as listeners:
        result = launcher(train_and_list, os.getpid(), strategy=strategy, options=options_of(strategy), **arguments)
    return ListenedLaunch(result, listeners)
