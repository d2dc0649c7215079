"""A launcher of ranks that a command starts itself, as ``llamafactory-cli`` and ``axolotl`` do.

Its ranks are there already: the rank that starts it becomes one of them, and runs what the launcher would. Runs in
ranks; imports the stack only where a launcher was started.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_trlcompat.launch import launchers
from pytest_trlcompat.launch.program import CommandError, LauncherWords, Program, launcher_words, program
from pytest_trlcompat.launch.strategy import StrategyError

__all__ = ["Becomes", "NestedLauncherError", "replaced"]

_OF_THE_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "ACCELERATE_", "FSDP_", "TORCHELASTIC_")


class NestedLauncherError(RuntimeError):
    """A command starts a launcher whose ranks this launch's are not."""


class Becomes(BaseException):
    """Ends a program that has started a launcher; not an ``Exception``, so that the program does not handle it.

    Attributes:
        program: what the launcher's ranks run.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.program = program


@contextlib.contextmanager
def replaced(running: Program) -> Iterator[None]:
    """Within the block, a launcher that is started, by :mod:`subprocess` or ``os.exec*``, raises :class:`Becomes`."""

    def become(command: Any, env: Any, folder: Any) -> None:
        words = _words(command)
        found = None if words is None else launcher_words(words)
        if words is not None and found is not None:
            raise Becomes(_of_this_launch(running, found, words, env, folder))

    popen: Any = subprocess.Popen
    start = popen.__init__

    def started(process: Any, args: Any, *more: Any, **options: Any) -> None:
        become(args, options.get("env"), options.get("cwd"))
        start(process, args, *more, **options)

    saved = {name: getattr(os, name) for name in ("execv", "execve", "execvp", "execvpe", "system")}

    def instead_of(name: str) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            command = args[0] if name == "system" else args[1]
            become(command, args[2] if name in ("execve", "execvpe") else None, None)
            return saved[name](*args)

        return called

    popen.__init__ = started
    for name in saved:
        setattr(os, name, instead_of(name))
    try:
        yield
    finally:
        popen.__init__ = start
        for name, function in saved.items():
            setattr(os, name, function)


def _words(command: Any) -> list[str] | None:
    """The words of what is started; ``None`` if they cannot be told."""
    try:
        if isinstance(command, (str, bytes)):
            words = shlex.split(os.fsdecode(command))
        else:
            words = [os.fsdecode(word) for word in command]
    except (TypeError, ValueError):
        return None
    while words and "=" in words[0].split("/")[0]:  # variables of a shell
        words = words[1:]
    return words


def _of_this_launch(running: Program, found: LauncherWords, words: Sequence[str], env: Any, folder: Any) -> Program:
    """What this rank runs in place of the launcher.

    Raises:
        NestedLauncherError: it asks for other ranks than this launch's.
    """
    text = f"{running!r} starts {shlex.join(words)}"
    advice = "pass what it runs as the command, or have it start no launcher"
    if threading.current_thread() is not threading.main_thread():
        raise NestedLauncherError(f"{text} in a thread of its own, where ranks cannot become its ranks; {advice}")
    here = Path(running.folder) / os.fspath(folder) if folder else Path.cwd()
    try:
        read = launchers.read(found)
        launchers.world_size_of(read, int(os.environ.get("WORLD_SIZE", "1")))
        asked = launchers.strategy_of(read, here)
        inner = program(("python", *read.target), here)
    except (CommandError, StrategyError) as error:
        raise NestedLauncherError(f"{text}, which ranks cannot become: {error}; {advice}") from None
    if asked is not None and asked.name != running.strategy:
        raise NestedLauncherError(
            f"{text}, which asks for {asked.name}, while the launch runs under {running.strategy}; pass "
            f"strategy={asked.name!r}"
        )
    if isinstance(env, Mapping):
        own = {os.fsdecode(key): os.fsdecode(value) for key, value in env.items()}
        os.environ.update({key: value for key, value in own.items() if not key.startswith(_OF_THE_LAUNCH)})
    return replace(inner, gets_local_rank=read.gets_local_rank)
