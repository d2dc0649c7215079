"""A command line, as a shell and Python would understand it: a script or a module, or a launcher of ranks.

Runs in the test process, and in ranks for what a command starts itself. Must not import the stack.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path

from pytest_trlcompat.launch.strategy import Strategy

__all__ = [
    "CommandError",
    "LauncherWords",
    "Program",
    "interpreter_path",
    "launcher_words",
    "program",
    "started_program",
]

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_WITHOUT_EFFECT = ("-u", "-B", "-q", "-s")
"""Options of Python that change nothing of what a rank does: it writes each line at once, and writes no bytecode."""
_HELPERS = ("debugpy", "pip", "ray", "tensorboard", "torch", "triton", "wandb")
"""Packages that start programs of their own, which do not train: compilers' workers, servers of logs."""
_LAUNCHERS = {"accelerate-launch": "accelerate", "torchrun": "torchrun", "deepspeed": "deepspeed", "ds": "deepspeed"}
_LAUNCHER_MODULES = {
    "accelerate.commands.launch": "accelerate",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
}
_ACCELERATE_MODULES = ("accelerate", "accelerate.commands.accelerate_cli")
_SHEBANG = re.compile(rb"#![^\n]*python|#!/bin/sh\n'''exec' [^\n]*python")
"""How a script begins that an installer has written for Python; the second form where the path is long."""


class CommandError(ValueError):
    """A command cannot run in ranks; the message says why, and what to do."""


@dataclass(frozen=True)
class Program:
    """What every rank runs.

    Attributes:
        words: the command as it was given.
        target: the absolute path of a script, or the name of a module.
        is_module: which of them it is.
        arguments: what follows, ``sys.argv[1:]``.
        folder: the working directory.
        strategy: of the launch, which a launcher that the command starts must not contradict.
        follow: what to do where the program starts another of Python's in a process of its own: ``True``: the rank runs
            that in its place; ``False``: nothing; ``None``: refuse.
        gets_local_rank: whether ``--local_rank=N`` stands before the arguments, as DeepSpeed's launcher passes it.
        interpreter_path: ``sys.path`` of a new interpreter, without ``PYTHONPATH`` and the program's folder.
        test_path: that of the test process, of which only ``interpreter_path`` is for the program.
    """

    words: tuple[str, ...]
    target: str
    is_module: bool
    arguments: tuple[str, ...]
    folder: str
    strategy: Strategy | None = None
    follow: bool | None = None
    gets_local_rank: bool = False
    interpreter_path: tuple[str, ...] = ()
    test_path: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class LauncherWords:
    """A command that starts ranks: ``accelerate launch``, ``torchrun`` or ``deepspeed``.

    Attributes:
        launcher: ``accelerate``, ``torchrun`` or ``deepspeed``.
        words: what follows its name.
    """

    launcher: str
    words: tuple[str, ...]


@functools.cache
def interpreter_path() -> tuple[str, ...]:
    """``sys.path`` of a new interpreter: the standard library, and what is installed. Starts one, once."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    code = "import json, sys; print(json.dumps(sys.path))"
    printed = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True).stdout
    return tuple(entry for entry in json.loads(printed.splitlines()[-1]) if entry)


def launcher_words(words: Sequence[str]) -> LauncherWords | None:
    """The launcher that a command is, by name or as a module of Python's; ``None`` if it is another command."""
    if not words:
        return None
    name, rest = Path(words[0]).name, tuple(words[1:])
    if _is_python(words[0]):
        module, rest = _module_of(rest)
        if module in _LAUNCHER_MODULES:
            return LauncherWords(_LAUNCHER_MODULES[module], rest)
        name = "accelerate" if module in _ACCELERATE_MODULES else ""
    if name == "accelerate" and rest[:1] == ("launch",):
        return LauncherWords("accelerate", rest[1:])
    return LauncherWords(_LAUNCHERS[name], rest) if name in _LAUNCHERS else None


def _is_python(word: str) -> bool:
    return word == sys.executable or _PYTHON.fullmatch(Path(word).name) is not None


def _module_of(words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The module that Python runs with these arguments, and what follows it; empty if it runs something else."""
    while words and words[0] in _WITHOUT_EFFECT:
        words = words[1:]
    return (words[1], words[2:]) if words[:1] == ("-m",) and len(words) > 1 else ("", words)


def started_program(words: Sequence[str]) -> str:
    """The script or the module that a command gives to Python; empty for another command, and for code in a word.

    Empty too for the standard library's and those of :data:`_HELPERS`, which do something beside what starts them.
    """
    if not words or not _is_python(words[0]):
        return ""
    module, rest = _module_of(tuple(words[1:]))
    if module:
        top = module.partition(".")[0]
        return "" if top in (*sys.stdlib_module_names, *_HELPERS) else module
    if not rest or rest[0].startswith("-"):
        return ""
    parents = Path(rest[0]).resolve().parents
    beside = any(parent.parent.name == "site-packages" and parent.name in _HELPERS for parent in parents)
    return "" if beside or Path(sysconfig.get_path("stdlib")) in parents[:2] else rest[0]


def program(words: Sequence[str], folder: Path) -> Program:
    """What a command runs that is no launcher.

    Args:
        words: ``["python", "-m", "package.module", ...]``, ``["python", "script.py", ...]``, ``["script.py", ...]``, or
            the name of a command that is installed beside this interpreter, or found on ``PATH``, and is Python.
        folder: the working directory, from which paths are meant.

    Raises:
        CommandError: it is none of these; with what was looked for, and where.
    """
    first, rest = words[0], tuple(words[1:])
    if _is_python(first):
        return _of_python(tuple(words), rest, folder)
    if re.match(r"\w+=", first) or Path(first).name == "env":
        raise CommandError(f"{shlex.join(words)}: variables of the environment belong into env={{...}} of the launch")
    path = _script(first, folder)
    return Program(tuple(words), str(path), False, rest, str(folder))


def _of_python(words: tuple[str, ...], rest: tuple[str, ...], folder: Path) -> Program:
    module, after = _module_of(rest)
    if module:
        return Program(words, module, True, after, str(folder))
    if not after or after[0].startswith("-"):
        found = after[0] if after else "nothing"
        raise CommandError(
            f"{shlex.join(words)}: after python, ranks run -m MODULE or a script's path, not {found}; they are "
            "interpreters already, so that its other options cannot take effect"
        )
    path = folder / after[0]
    if not path.exists():
        raise CommandError(f"{shlex.join(words)}: there is no {path}")
    return Program(words, str(path.resolve()), False, after[1:], str(folder))


def _script(name: str, folder: Path) -> Path:
    """The Python script that a shell would run by this name."""
    if os.sep in name or name.endswith(".py"):
        path = folder / name
        if not path.is_file():
            raise CommandError(f"{name}: there is no file {path}")
    else:
        beside = Path(sysconfig.get_path("scripts")) / name
        found = str(beside) if beside.is_file() else shutil.which(name)
        if found is None:
            raise CommandError(
                f"{name}: no such command, neither in {beside.parent} nor on PATH{_near(name)}. Install the package "
                "that has it beside this interpreter, or pass ['python', '-m', its module]"
            )
        path = Path(found)
    if path.suffix != ".py" and not _is_python_script(path):
        raise CommandError(
            f"{name}: {path} is no Python script, and ranks run Python alone; pass the Python command that it runs"
        )
    return path.absolute()


def _is_python_script(path: Path) -> bool:
    with path.open("rb") as file:
        return _SHEBANG.match(file.read(512)) is not None


def _near(name: str) -> str:
    known = {entry.name for entry in metadata.entry_points(group="console_scripts")}
    near = get_close_matches(name, sorted(known), n=3)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
