"""A launcher of ranks that a command starts itself, as ``trl sft``, ``llamafactory-cli`` and ``axolotl train`` do.

Its ranks are there already: the rank that starts it becomes one of them, and runs what the launcher would. It is seen
where a process is started, and where the launcher's own function is called. Runs in ranks; imports of the stack only
what is there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_trlcompat.launch import launchers
from pytest_trlcompat.launch.launchers import Read
from pytest_trlcompat.launch.program import CommandError, Program, launcher_words, program, started_program
from pytest_trlcompat.launch.strategy import Strategy, StrategyError

__all__ = ["Becomes", "NestedLauncherError", "replaced"]

_FUNCTIONS = (
    ("accelerate.commands.launch", "_validate_launch_command", "accelerate"),  # which launch_command begins with
    ("accelerate.commands.launch", "launch_command", "accelerate"),
    ("torch.distributed.run", "run", "torchrun"),
)
"""Functions that start a launcher in the process that calls them, with the options as their parser made them."""
_STARTS = ("execv", "execve", "execvp", "execvpe", "system")
_OF_THE_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "ACCELERATE_", "FSDP_", "TORCHELASTIC_")
_ADVICE = "pass what it runs as the command, or have it start no launcher"


class NestedLauncherError(RuntimeError):
    """A command starts ranks that are not this launch's, or another program of Python's that would be none."""


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
    """Within the block, a launcher that is started raises :class:`Becomes`, or a :class:`NestedLauncherError`.

    So does, as ``follow`` says, another program of Python's.
    """
    with contextlib.ExitStack() as exits:
        for owner, name, substitute in _substitutes(running):
            own = getattr(owner, name)
            exits.callback(setattr, owner, name, own)
            setattr(owner, name, substitute(own))
        yield


def _substitutes(running: Program) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    def started(own: Any) -> Any:
        def start(process: Any, args: Any, *more: Any, **options: Any) -> None:
            _look(running, args, options.get("env"), options.get("cwd"))
            own(process, args, *more, **options)

        return start

    def replacing(name: str) -> Callable[[Any], Any]:
        def substitute(own: Any) -> Any:
            def called(*args: Any) -> Any:
                command = args[0] if name == "system" else args[1]
                _look(running, command, args[2] if name.endswith("e") else None, None)
                return own(*args)

            return called

        return substitute

    def calling(launcher: str) -> Callable[[Any], Any]:
        def called(options: Any) -> None:
            _become(
                running, launchers.NAMES[launcher], None, None, lambda: launchers.read_parsed(launcher, vars(options))
            )

        return lambda own: called

    yield subprocess.Popen, "__init__", started
    for name in _STARTS:
        yield os, name, replacing(name)
    if "torch" in sys.modules:
        for module, name, launcher in _FUNCTIONS:
            with contextlib.suppress(ImportError):
                owner = importlib.import_module(module)
                if hasattr(owner, name):
                    yield owner, name, calling(launcher)


def _look(running: Program, command: Any, env: Any, folder: Any) -> None:
    words = _words(command)
    if words is None:
        return
    found = launcher_words(words)
    if found is not None:
        _become(running, shlex.join(words), env, folder, functools.partial(launchers.read, found))
    elif running.follow is not False and started_program(words):
        _follow(running, words, env, folder)


def _words(command: Any) -> list[str] | None:
    """The words of what is started; ``None`` if they cannot be told."""
    try:
        if isinstance(command, (str, bytes)):
            words = shlex.split(os.fsdecode(command))
        else:
            words = [os.fsdecode(word) for word in command]
    except (TypeError, ValueError):
        return None
    while words and "=" in words[0].split("/")[0]:  # variables, for a shell
        words = words[1:]
    return words


def _become(running: Program, started: str, env: Any, folder: Any, read: Callable[[], Read]) -> None:
    """Have this rank run what the ranks of a launcher would.

    Args:
        started: the launcher, for messages.
        env: variables for it, if it gets others; ``folder`` likewise.
        read: reads its options.

    Raises:
        Becomes: to end what runs.
        NestedLauncherError: the launcher asks for other ranks than this launch's.
    """
    text = f"{running!r} starts {started}"
    if threading.current_thread() is not threading.main_thread():
        raise NestedLauncherError(f"{text} in a thread, where a rank cannot become one of its ranks; {_ADVICE}")
    here = Path.cwd() / os.fspath(folder or "")
    try:
        found = read()
        asked = launchers.strategy_of(found, here)
        size = int(os.environ.get("WORLD_SIZE", "1"))
        launchers.world_size_of(found, size)
        inner = program(("python", *found.target), here)
    except (CommandError, StrategyError) as error:
        raise NestedLauncherError(f"{text}, whose ranks these cannot become: {error}; {_ADVICE}") from None
    if asked is not None and running.strategy is not None:
        _check(text, asked, running.strategy, found, size)
        launchers.enter(asked, running.strategy, os.environ, Path(tempfile.mkdtemp()))
    _take_variables(env)
    raise Becomes(replace(inner, gets_local_rank=found.gets_local_rank))


def _follow(running: Program, words: Sequence[str], env: Any, folder: Any) -> None:
    """Have this rank run what a process of its own would, which would be no rank.

    Raises:
        Becomes: to end what runs.
        NestedLauncherError: nobody has said that it may.
    """
    text = f"{running!r} starts {shlex.join(words)}"
    if running.follow is None:
        raise NestedLauncherError(
            f"{text} in a process of its own, which is no rank of this launch. If that is what trains, pass it as the "
            "command, or follow=True, and each rank runs it in its own place; if it is not, pass follow=False"
        )
    if threading.current_thread() is not threading.main_thread():
        raise NestedLauncherError(f"{text} in a thread, where a rank cannot run it in its own place; {_ADVICE}")
    try:
        inner = program(words, Path.cwd() / os.fspath(folder or ""))
    except CommandError as error:
        raise NestedLauncherError(f"{text}, which ranks cannot run: {error}") from None
    _take_variables(env)
    raise Becomes(inner)


def _take_variables(env: Any) -> None:
    if isinstance(env, Mapping):
        own = {os.fsdecode(key): os.fsdecode(value) for key, value in env.items()}
        os.environ.update({key: value for key, value in own.items() if not key.startswith(_OF_THE_LAUNCH)})


def _check(text: str, asked: Strategy, own: Strategy, found: Read, size: int) -> None:
    if asked.name != own.name:
        raise NestedLauncherError(
            f"{text}, which asks for {asked.name}, while the launch runs under {own.name}; pass strategy={asked.name!r}"
        )
    if found.size is None and asked.world_size not in (None, size):
        raise NestedLauncherError(
            f"{text}, whose configuration file says {asked.world_size} ranks, while the launch has {size}; pass "
            f"world_size={asked.world_size}, or say --num_processes {size} there"
        )
