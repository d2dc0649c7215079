"""What ranks run of a command line, as a shell and Python would understand it: a script or a module.

Runs in the test process, and in ranks for what a command starts itself.
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

from pytest_trlcompat.launch.executables import is_python_script
from pytest_trlcompat.launch.strategy import Strategy
from pytest_trlcompat.launch.words import PythonWords, python_words

__all__ = ["CommandError", "Program", "interpreter_path", "program"]


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


@functools.cache
def interpreter_path() -> tuple[str, ...]:
    """``sys.path`` of a new interpreter: the standard library, and what is installed. Starts one, once."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    code = "import json, sys; print(json.dumps(sys.path))"
    printed = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True).stdout
    # The last line, since .pth files and sitecustomize may print before it.
    return tuple(entry for entry in json.loads(printed.splitlines()[-1]) if entry)


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
    python = python_words(words)
    if python is not None:
        return _of_python(tuple(words), python, folder)
    if re.match(r"\w+=", first) or Path(first).name == "env":
        raise CommandError(f"{shlex.join(words)}: variables of the environment belong into env={{...}} of the launch")
    path = _script(first, folder)
    return Program(tuple(words), str(path), False, rest, str(folder))


def _of_python(words: tuple[str, ...], python: PythonWords, folder: Path) -> Program:
    if python.options or python.kind not in ("m", "script"):
        seen = python.options[0] if python.options else "-c" if python.kind == "c" else "nothing"
        raise CommandError(
            f"{shlex.join(words)}: after python, ranks run -m MODULE or a script's path, not {seen}; they are "
            "interpreters already, so that its other options cannot take effect"
        )
    if python.kind == "m":
        return Program(words, python.target, True, python.arguments, str(folder))
    path = folder / python.target
    if not path.exists():
        raise CommandError(f"{shlex.join(words)}: there is no {path}")
    return Program(words, str(path.resolve()), False, python.arguments, str(folder))


def _script(name: str, folder: Path) -> Path:
    """The Python script that a shell would run by this name."""
    if os.sep in name or name.endswith(".py"):
        path = folder / name
        if not path.is_file():
            raise CommandError(f"{name}: there is no file {path}")
    else:
        # As an activated environment has it; without activation PATH may lead to another one's command.
        beside = Path(sysconfig.get_path("scripts")) / name
        command = str(beside) if beside.is_file() else shutil.which(name)
        if command is None:
            raise CommandError(
                f"{name}: no such command, neither in {beside.parent} nor on PATH{_near(name)}. Install the package "
                "that has it beside this interpreter, or pass ['python', '-m', its module]"
            )
        path = Path(command)
    if path.suffix != ".py" and not is_python_script(path):
        raise CommandError(
            f"{name}: {path} is no Python script, and ranks run Python alone; pass the Python command that it runs"
        )
    return path.absolute()


def _near(name: str) -> str:
    known = {entry.name for entry in metadata.entry_points(group="console_scripts")}
    near = get_close_matches(name, sorted(known), n=3)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
