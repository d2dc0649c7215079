"""One training of an adapter per subject and strategy, shared by the suites that judge it.

Runs in the test process and imports nothing of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..in_rank import adapter_saving

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["AdapterTraining", "AdapterTrainings"]


_RESUMED = ("ddp", "fsdp1")
"""The strategies under which resuming is judged."""


@dataclass(frozen=True)
class AdapterTraining:
    """What rank 0 measured (:mod:`adapter_saving`), the engines that it built, and where it saved."""

    found: Mapping[str, Any]
    engines: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class AdapterTrainings:
    """Trains for a subject and strategy.

    Attributes:
        launch: makes each launch once.
        folder: below which each has a folder of its own.
    """

    launch: Callable[..., LaunchResult]
    model: TinyModel
    folder: Path

    def __call__(self, subject: str, strategy: str) -> AdapterTraining:
        folder = self.folder / f"{subject}-{strategy}"
        body = adapter_saving.train
        resuming = strategy in _RESUMED
        # Not sharded where a broken trainer fails before it has wrapped anything.
        result = self.launch(body, subject, self.model, str(folder), resuming, strategy=strategy, sharded=False)
        return AdapterTraining(result.values[0], result.ranks[0].proof["engines"], folder)
