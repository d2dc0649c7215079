"""What a text for a shell starts: a line, a script's file, the recipes of a Makefile.

A text is never run here. It is only looked at, so that one which starts ranks is not given to a shell. Runs in ranks.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_trlcompat.launch.executables import executable, is_python_script, shebang
from pytest_trlcompat.launch.words import python_words
from pytest_trlcompat.launch.wrappers import Surroundings

__all__ = ["Command", "Text", "commands", "text_of"]

_SHELLS = frozenset(("ash", "bash", "dash", "ksh", "sh", "zsh"))
_VALUED = ("-o", "+o", "-O", "+O", "--rcfile", "--init-file")
_KEYWORDS = frozenset(("if", "then", "else", "elif", "do", "while", "until", "!", "{", "}"))
_OPERATORS = frozenset(";&|()\n`")
_HEREDOC = re.compile(r"<<-?[ \t]*([\"']?)(\w+)\1([^\n]*\n).*?^[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SUBSTITUTED = re.compile(r"\$\(([^)]*)\)|`([^`]*)`")
_MAKE_VARIABLE = re.compile(r"\$\((\w+)\)")
_MAKE_ASSIGNMENT = re.compile(r"^(?:export[ \t]+)?(\w+)[ \t]*[:?+]*=[ \t]*(.*)$", re.MULTILINE)
_MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
_JUSTFILES = ("justfile", "Justfile", ".justfile")
_PROJECT_FILES = ("pyproject.toml", "hatch.toml", "Pipfile", "pixi.toml")
_RUN_SCRIPTS = frozenset(("hatch", "pdm", "pipenv", "pixi", "rye"))
"""What runs scripts that these files say, where what it is given is no command."""
_QUOTED = re.compile(r"\"([^\"]*)\"|'([^']*)'")
_LARGEST = 1 << 20
"""Bytes of a script that are looked at; what is longer is no text that somebody has written."""


@dataclass(frozen=True)
class Text:
    """What a command gives to a shell or to ``make``.

    Attributes:
        name: a file's, or empty for a line among the words.
        text: what is in it.
        arguments: what ``$@`` is in it.
        is_line: whether it is one that could be given as words.
        only_launchers: whether only a launcher in it matters: a Makefile has other targets, and a command on ``PATH``
            is mostly not the user's.
    """

    name: str
    text: str
    arguments: tuple[str, ...] = ()
    is_line: bool = False
    only_launchers: bool = False


@dataclass(frozen=True)
class Command:
    """A simple command of a text.

    Attributes:
        line: where it ends, from 1.
        words: with the variables that the text sets, and those around it.
    """

    line: int
    words: tuple[str, ...]


@dataclass
class _Reader:
    """Splits a text into words and operators, as a shell does, without running anything."""

    text: str
    position: int = 0
    line: int = 1
    word: str | None = None
    substituted: list[str] = field(default_factory=list)

    def tokens(self) -> Iterator[tuple[int, str, bool]]:
        """The line, the word or the operator, and whether it is an operator."""
        while self.position < len(self.text):
            character = self._next()
            if character == "\\":
                following = self._next()
                if following != "\n":
                    self._add(following)
            elif character == "'":
                self._add(self._until("'"))
            elif character == '"':
                self._quoted()
            # Within a word it begins no comment.
            elif character == "#" and self.word is None:
                while self.position < len(self.text) and self.text[self.position] != "\n":
                    self.position += 1
            elif character in " \t\r" or character in _OPERATORS or character in "<>":
                if self.word is not None:
                    yield self.line, self.word, False
                    self.word = None
                if character not in " \t\r":
                    yield self.line, character, True
            else:
                self._add(character)
        if self.word is not None:
            yield self.line, self.word, False

    def _next(self) -> str:
        character = self.text[self.position : self.position + 1]
        self.position += 1
        self.line += character == "\n"
        return character

    def _add(self, text: str) -> None:
        self.word = (self.word or "") + text

    def _until(self, end: str) -> str:
        stop = self.text.find(end, self.position)
        taken = self.text[self.position : stop if stop >= 0 else len(self.text)]
        self.position += len(taken) + 1
        self.line += taken.count("\n")
        return taken

    def _quoted(self) -> None:
        start = len(self.word or "")
        self._add("")
        while (character := self._next()) not in ('"', ""):
            self._add(self._next() if character == "\\" else character)
        # A command that is substituted within quotation marks is one all the same.
        for groups in _SUBSTITUTED.findall((self.word or "")[start:]):
            self.substituted += [text for text in groups if text]


def commands(text: str, variables: Mapping[str, str], arguments: Sequence[str] = ()) -> Iterator[Command]:
    """The simple commands of a text, in order; those that a condition leaves out too.

    Args:
        variables: around the text; those that it sets itself are added.
        arguments: what ``$@`` and ``$*`` are.
    """
    # Here-documents are no commands, but their lines count.
    known = dict(variables)
    reader = _Reader(_HEREDOC.sub(lambda match: match[3] + "\n" * (match[0].count("\n") - 1), text))
    words: list[str] = []
    is_file = False
    line = 1
    for line, token, is_operator in reader.tokens():
        if is_operator and token in "<>":
            is_file = True
            # In 2>file the number is a descriptor and no word.
            if words and words[-1].isdigit():
                words.pop()
        elif is_operator and not (is_file and token == "&"):  # 2>&1
            is_file = False
            if words:
                # The reader has already counted the line feed that ends the command.
                yield from _command(line - (token == "\n"), words, known, arguments)
            words = []
        elif is_file:
            # The word after the operator is the file's name; the second half of >> is not.
            is_file = is_operator
        # Keywords are such only where a command begins.
        elif words or token not in _KEYWORDS:
            words.append(token)
    if words:
        yield from _command(line, words, known, arguments)
    for substituted in reader.substituted:
        yield from commands(substituted, known, arguments)


def _command(line: int, words: list[str], known: dict[str, str], arguments: Sequence[str]) -> Iterator[Command]:
    expanded = [part for word in words for part in _expanded(word, known, arguments)]
    plain = expanded[1:] if expanded[:1] in (["export"], ["local"], ["readonly"]) else expanded
    assigned = [_ASSIGNMENT.fullmatch(word) for word in plain]
    if all(assigned):
        known.update({match[1]: match[2] for match in assigned if match is not None})
    else:
        yield Command(line, tuple(expanded))


def _expanded(word: str, known: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    if word in ("$@", "$*"):
        return list(arguments)

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name.isdigit():
            return arguments[int(name) - 1] if 0 < int(name) <= len(arguments) else match[3] or ""
        return known.get(name, match[3] or "")

    text = _VARIABLE.sub(value, word)
    # As a shell splits what a variable holds; that there were quotation marks is no longer known here.
    is_split = text != word and _ASSIGNMENT.match(word) is None
    return text.split() if is_split else [text]


def text_of(words: Sequence[str], around: Surroundings) -> Text | None:
    """The text that a command gives to a shell or to ``make``; ``None`` if it gives none that can be read."""
    if not words:
        return None
    name = os.path.basename(words[0])
    if name in _SHELLS:
        return _of_shell(tuple(words[1:]), around)
    if words[0] in (".", "source") and len(words) > 1:
        return _read(around.path / words[1], tuple(words[2:]))
    if name in ("make", "gmake", "just"):
        return _of_make(tuple(words[1:]), around, _JUSTFILES if name == "just" else _MAKEFILES)
    if name in _RUN_SCRIPTS and "run" in words:
        return _of_project(around)
    path = None if python_words(words) is not None else executable(words[0], around.path, around.search_path)
    if path is None or is_python_script(path):
        return None
    runs = shebang(path)
    if not (_names_shell(runs) if runs else path.suffix == ".sh"):
        return None
    text = _read(path, tuple(words[1:]))
    return None if text is None else replace(text, only_launchers=os.sep not in words[0])


def _names_shell(runs: Sequence[str]) -> bool:
    return any(os.path.basename(word) in _SHELLS for part in runs for word in part.split())


def _of_shell(words: tuple[str, ...], around: Surroundings) -> Text | None:
    rest, is_line = list(words), False
    while rest and rest[0][:1] in ("-", "+") and len(rest[0]) > 1:
        word = rest.pop(0)
        if word == "--":
            break
        if word in _VALUED:
            del rest[:1]
        elif not word.startswith("--"):
            is_line = is_line or "c" in word
            # In -eo pipefail the cluster's last letter takes the next word.
            if word[-1] in "oO":
                del rest[:1]
    if not rest:
        return None
    # The word after the line is $0.
    if is_line:
        return Text("", rest[0], tuple(rest[2:]), is_line=True)
    return _read(around.path / rest[0], tuple(rest[1:]))


def _of_project(around: Surroundings) -> Text | None:
    """Each text between quotation marks in the project's file, on its line."""
    for folder in (around.path, *around.path.parents):
        files = [file for name in _PROJECT_FILES if (file := _read(folder / name, ())) is not None]
        if files:
            lines = [
                "; ".join(filter(None, map("".join, _QUOTED.findall(line)))) for line in files[0].text.splitlines()
            ]
            return Text(files[0].name, "\n".join(lines), only_launchers=True)
    return None


def _of_make(words: tuple[str, ...], around: Surroundings, defaults: Sequence[str]) -> Text | None:
    folder, names = around.path, []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word in ("-C", "--directory"):
            folder = folder / following
        elif word.startswith(("-C", "--directory=")):
            folder = folder / word.removeprefix("-C").removeprefix("--directory=")
        elif word in ("-f", "--file", "--makefile"):
            names.append(following)
        elif word.startswith(("-f", "--file=")):
            names.append(word.removeprefix("-f").removeprefix("--file="))
    for name in names or defaults:
        makefile = _read(folder / name, ())
        if makefile is not None:
            return Text(makefile.name, _recipes(_with_included(makefile.text, folder)), only_launchers=True)
    return None


def _recipes(text: str) -> str:
    """A Makefile with its variables written as a shell's, and without the marks before its commands."""
    text = _MAKE_ASSIGNMENT.sub(lambda match: f"{match[1]}='{match[2]}'", text)
    return re.sub(r"^[ \t]+[-+@ ]*", "\t", _MAKE_VARIABLE.sub(r"${\1}", text), flags=re.MULTILINE)


def _with_included(text: str, folder: Path) -> str:
    names = re.findall(r"^-?include[ \t]+(.+)$", text, re.MULTILINE)
    files = (_read(folder / name, ()) for line in names for name in line.split())
    return "\n".join([text, *(file.text for file in files if file is not None)])


def _read(path: Path, arguments: tuple[str, ...]) -> Text | None:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST)
    except OSError:
        return None
    return None if b"\0" in content else Text(path.name, os.fsdecode(content), arguments)
