"""What the words of a command say by themselves: a launcher of ranks, or what Python is given.

Runs in the test process, and in ranks for what a command starts itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LauncherWords", "PythonWords", "is_launcher_text", "launcher_words", "python_words"]

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_WITHOUT_EFFECT = ("-u", "-B", "-q", "-s")
"""Options of Python that change nothing of what a rank does: it writes each line at once, and writes no bytecode."""
_FLAGS = frozenset("bBdEiIOPqsSuvx")
_VALUED = frozenset("WX")
_LAUNCHERS = {"accelerate-launch": "accelerate", "torchrun": "torchrun", "deepspeed": "deepspeed", "ds": "deepspeed"}
_LAUNCHER_MODULES = {
    "accelerate.commands.launch": "accelerate",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
}
_ACCELERATE_MODULES = ("accelerate", "accelerate.commands.accelerate_cli")
_LAUNCHER_TEXT = re.compile(
    r"\btorchrun\b|\baccelerate(-|[\"', ]+)launch\b|\baccelerate\.commands\.launch\b"
    r"|\btorch\.distributed\.(run|launch)\b|\bdeepspeed\.launcher\b|[\"']deepspeed[\"' ]"
)


@dataclass(frozen=True)
class LauncherWords:
    """A command that starts ranks: ``accelerate launch``, ``torchrun`` or ``deepspeed``.

    Attributes:
        launcher: ``accelerate``, ``torchrun`` or ``deepspeed``.
        words: what follows its name.
        is_legacy: whether it is ``torch.distributed.launch``, which has an option more, and passes ``--local-rank``.
    """

    launcher: str
    words: tuple[str, ...]
    is_legacy: bool = False


@dataclass(frozen=True)
class PythonWords:
    """What an interpreter is given.

    Attributes:
        options: before what it runs, without those of :data:`_WITHOUT_EFFECT`.
        kind: ``m`` for a module, ``c`` for code, ``script``, or empty: nothing, or an option that shows something.
        target: the module, the code or the script.
        arguments: what follows.
    """

    options: tuple[str, ...]
    kind: str = ""
    target: str = ""
    arguments: tuple[str, ...] = ()


def is_launcher_text(text: str) -> bool:
    """Whether code names a launcher in a way in which it can start one."""
    return _LAUNCHER_TEXT.search(text) is not None


def launcher_words(words: Sequence[str]) -> LauncherWords | None:
    """The launcher that a command is, by name or as a module of Python's; ``None`` if it is another command."""
    if not words:
        return None
    name, rest = os.path.basename(words[0]), tuple(words[1:])
    python = python_words(words)
    if python is not None:
        # The interpreter's options are the launcher's own, which starts ranks without them.
        module, name, rest = _module_of(python), "", python.arguments
        if module in _LAUNCHER_MODULES:
            return LauncherWords(_LAUNCHER_MODULES[module], rest, module == "torch.distributed.launch")
        if module in _ACCELERATE_MODULES:
            name = "accelerate"
        # An installed command given to the interpreter by its file: python /path/to/bin/torchrun.
        elif python.kind == "script" and not python.target.endswith(".py"):
            name = os.path.basename(python.target)
    if name == "accelerate" and rest[:1] == ("launch",):
        return LauncherWords("accelerate", rest[1:])
    return LauncherWords(_LAUNCHERS[name], rest) if name in _LAUNCHERS else None


def _module_of(python: PythonWords) -> str:
    """The module that is run, also where the file of a launcher is."""
    if python.kind == "m":
        return python.target
    path = python.target if python.kind == "script" else ""
    return next((name for name in _LAUNCHER_MODULES if path.endswith(f"/{name.replace('.', '/')}.py")), "")


def python_words(words: Sequence[str]) -> PythonWords | None:
    """Split what is given to an interpreter, as it does itself; ``None`` if the command is none."""
    if not words or not (words[0] == sys.executable or _PYTHON.fullmatch(os.path.basename(words[0]))):
        return None
    rest, options = list(words[1:]), list[str]()
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        # The only long option of Python's that takes a value.
        if word == "--check-hash-based-pycs":
            options += [word, *rest[:1]]
            del rest[:1]
            continue
        ended = _read_letters(word, rest, options)
        if ended is not None:
            return ended
    if not rest or rest[0] == "-":
        return PythonWords((*options, *rest[:1]), arguments=tuple(rest[1:]))
    return PythonWords(tuple(options), "script", rest[0], tuple(rest[1:]))


def _read_letters(word: str, rest: list[str], options: list[str]) -> PythonWords | None:
    """Read one word of options, such as ``-um``; returns what ends them."""
    for index, letter in enumerate(word[1:], start=1):
        if letter in _FLAGS:
            options += [f"-{letter}"] if f"-{letter}" not in _WITHOUT_EFFECT else []
            continue
        is_valued = letter in "mc" or letter in _VALUED
        value = (word[index + 1 :] or (rest.pop(0) if rest else "")) if is_valued else ""
        if letter in "mc" and value:
            return PythonWords(tuple(options), letter, value, tuple(rest))
        if letter not in _VALUED:
            return PythonWords((*options, word), arguments=tuple(rest))
        options += [f"-{letter}", value]
        break
    return None
