"""The first command of a text for a shell that starts ranks, however it is wrapped.

Runs in ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pytest_trlcompat.launch.executables import executable, started_program
from pytest_trlcompat.launch.shells import Command, Text, commands, text_of
from pytest_trlcompat.launch.words import is_launcher_text, launcher_words, python_words
from pytest_trlcompat.launch.wrappers import Surroundings, unwrap

__all__ = ["first_start", "hides_launcher", "is_start"]

_DEPTH = 5
"""Scripts that start scripts, wrappers within wrappers; what goes deeper is taken for a start."""
_READERS = frozenset(
    ("awk", "cat", "cp", "dpkg", "echo", "egrep", "find", "git", "grep", "head", "hash", "install", "kill", "killall")
) | {"less", "ln", "ls", "mv", "pgrep", "pip", "pip3", "pkill", "printf", "rg", "rm", "sed", "tail", "type", "whereis"}
_READERS |= {"which", "man", "export", "tee", "touch", "diff", "wc", "stat", "file", "test", "[", "conda"}
"""Commands that may name a launcher without starting it."""


def first_start(text: Text, around: Surroundings, programs: bool, depth: int = 0) -> Command | None:
    """The first command of a text that starts a launcher of ranks, or, if ``programs``, another program of Python's.

    Of some texts a launcher alone, see :class:`Text`.
    """
    variables = around.variables
    for command in commands(text.text, variables, text.arguments):
        if is_start(command.words, around, programs and not text.only_launchers, depth):
            return command
    return None


def is_start(words: Sequence[str], around: Surroundings, programs: bool, depth: int = 0) -> bool:
    """Whether a command starts a launcher, or, if ``programs``, another program of Python's."""
    if launcher_words(words) is not None:
        return True
    if depth > _DEPTH:
        return True
    inner = unwrap(words, around, in_shell=True)
    if inner is not None:
        starts = (0,) if inner.is_certain else range(len(inner.words))
        # Where a wrapper's options cannot be read, any of its words may be the one that begins the command.
        return any(is_start(inner.words[start:], inner.around, programs, depth + 1) for start in starts)
    text = text_of(words, around)
    if text is not None:
        return first_start(text, around, programs, depth + 1) is not None
    python = python_words(words)
    if python is not None and python.kind == "c":
        return is_launcher_text(python.target)
    if programs and started_program(words, around.path, around.search_path):
        return True
    return hides_launcher(words, around)


def hides_launcher(words: Sequence[str], around: Surroundings) -> bool:
    """Whether the words of an unknown command contain a launcher with its script."""
    if len(words) < 2 or os.path.basename(words[0]) in _READERS or python_words(words) is not None:
        return False
    for start in range(1, len(words)):
        launcher = launcher_words(words[start:])
        # Many a command has a launcher's name among its words; with -m or an existing script it is started.
        if launcher is not None and any(
            word in ("-m", "--module") or (word.endswith(".py") and (around.path / word).is_file())
            for word in launcher.words
        ):
            return executable(words[0], around.path, around.search_path) is not None
    return False
