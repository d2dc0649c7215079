"""A command as a launch: what its ranks run, under which strategy, how many there are.

Runs in the test process.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_trlcompat.launch import launchers
from pytest_trlcompat.launch.program import CommandError, Program, program
from pytest_trlcompat.launch.strategy import Strategy
from pytest_trlcompat.launch.words import LauncherWords, launcher_words

__all__ = ["Planned", "plan"]


@dataclass(frozen=True)
class Planned:
    """A launch of a command.

    Attributes:
        launcher: the one that its words name, for a cold launch; ``None`` if they name none.
    """

    program: Program
    strategy: Strategy
    world_size: int | None
    launcher: str | None


def plan(
    words: Sequence[str | os.PathLike[str]],
    folder: Path,
    strategy: Strategy | None,
    world_size: int | None,
    default: Strategy,
    read: Callable[[LauncherWords], launchers.Read],
) -> Planned:
    """Decide how a command is launched.

    Args:
        words: of the command.
        folder: its working directory.
        strategy: what the caller asked for; ``world_size`` likewise.
        default: the strategy if neither the caller nor a launcher's configuration names one.
        read: :func:`pytest_trlcompat.launch.launchers.read`, where the stack can be imported.

    Raises:
        CommandError: it cannot be launched, or contradicts what the caller asked for.
        TypeError: ``words`` is one text.
    """
    command = _words(words)
    launcher = launcher_words(command)
    if launcher is None:
        chosen = strategy or default
        planned = program(command, folder)
        return Planned(replace(planned, strategy=chosen), chosen, world_size, None)
    parsed = read(launcher)
    asked = launchers.strategy_of(parsed, folder)
    if asked is not None and strategy is not None:
        raise CommandError(
            f"{shlex.join(command)} asks for {asked.name}, and strategy= for {strategy.name}; say it once"
        )
    if asked is None and strategy is None and launcher.launcher == "deepspeed":
        raise CommandError(f"{shlex.join(command)}: deepspeed says no stage; pass strategy='zero3', or another")
    chosen = asked or strategy or default
    # As the launcher starts it: a script or a module, by an interpreter.
    planned = program(("python", *parsed.target), folder)
    planned = replace(planned, words=command, strategy=chosen, gets_local_rank=parsed.gets_local_rank)
    size = launchers.world_size_of(parsed, world_size)
    return Planned(planned, chosen, 1 if size is None and chosen.name == "single" else size, launcher.launcher)


def _words(words: Any) -> tuple[str, ...]:
    if isinstance(words, (str, bytes)):
        raise TypeError(f"a command is a list of its words, as subprocess takes it: {shlex.split(os.fsdecode(words))}")
    command = tuple(os.fspath(word) for word in words)
    if not command or not all(isinstance(word, str) for word in command):
        raise TypeError(f"a command is a list of texts and paths, not {words!r}")
    return command
