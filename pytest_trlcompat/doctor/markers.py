"""Where the environment markers of a lock or a list hold: on which Pythons, platforms and machines, together.

The doctor is asked about other machines than its own, so no marker is judged by the interpreter that runs it. Instead
this module lists all environments that the markers of one file tell apart, and in which of them each marker holds.
``packaging`` evaluates the comparisons; this module combines them, to any depth, and considers each extra both as
asked for and as not.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

__all__ = ["PLATFORMS", "Environments", "MarkerError", "TooManyError"]

PLATFORMS = {
    "linux": {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"},
    "darwin": {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix"},
    "win32": {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt"},
}
_OLDEST_PYTHON = "3.8"
"""No release of the catalogue's Transformers runs on an older Python."""
_USUAL_PYTHON = "3.12"
_BEYOND_PYTHON = "4"
_MOST = 4096
"""Environments; those of a real lock are some dozens."""
_MOST_COMPARISONS = 500
"""Different ones in all markers; those of a real lock are some dozens."""
_COMPARISONS = 20_000
"""Of values of one variable by ``packaging``, each of which takes some ten microseconds."""
_LONGEST = 20_000
"""Characters of one marker."""
_OTHER = "another"
"""A value that no marker names."""

_TOKEN = re.compile(
    r"\s*(?:(?P<sign>[()])|(?P<word>and|or)\b|(?P<operator>===|[=!~<>]=|[<>]|in\b|not\s+in\b)"
    r"|(?P<name>[A-Za-z_][\w.]*)|(?P<text>'[^']*'|\"[^\"]*\"))"
)
_VERSION = re.compile(r"\d{1,5}(?:\.\d{1,5})*")
_PYTHON = ("python_version", "python_full_version")
_JOINT = {**dict.fromkeys(_PYTHON, "python"), **dict.fromkeys(PLATFORMS["linux"], "platform")}
"""Variables that do not vary independently, each with what they follow from."""
_UNLIMITED = ("platform_release", "platform_version", "implementation_version")
"""Variables with values of which nobody has a list."""
_VARIABLES = {*_JOINT, *_UNLIMITED, "platform_machine", "platform_python_implementation", "implementation_name"}
_OLD_NAMES = {
    "os.name": "os_name",
    "sys.platform": "sys_platform",
    "platform.machine": "platform_machine",
    "python_implementation": "platform_python_implementation",
    "platform.python_implementation": "platform_python_implementation",
}
"""Before :pep:`508`; ``packaging`` reads them, too."""


class MarkerError(ValueError):
    """The text, which is its argument, is no marker."""


class TooManyError(ValueError):
    """More environments than can be looked at one by one."""


@dataclass(frozen=True)
class _Atom:
    """One comparison.

    Attributes:
        text: as ``packaging`` reads it.
        variable: what decides it: ``python``, ``platform``, another variable of the environment, or its own text where
            that may hold or not, as whether an extra is asked for.
        name: the variable that it names, and the literal that it compares that with.
        negated: of what may hold or not, whether it holds where the variable's text does not.
        free: whether it may hold or not.
    """

    text: str
    variable: str
    name: str
    literal: str
    negated: bool = False
    free: bool = False


class Environments:
    """The environments that some markers tell apart, and in which of them each of these holds.

    Attributes:
        number: how many there are; a set of them is an integer with a bit for each.
        every: the set of all.
    """

    def __init__(self, markers: Iterable[str], *, python: str = "", requires_python: str = "", platform: str = ""):
        """
        Args:
            markers: all that are to be asked about.
            python: ``3.12``: consider that minor release alone.
            requires_python: consider the releases in that specifier set alone; one that is none is left aside.
            platform: a key of :data:`PLATFORMS`: consider that one alone.

        Raises:
            MarkerError: one of them is no marker.
            TooManyError: there are more than 4,096 environments, or a marker is too long.
        """
        self._read: dict[str, list[_Atom | str]] = {}
        for marker in markers:
            if marker not in self._read:
                self._read[marker] = _postfix(marker)
        atoms = dict.fromkeys(token for read in self._read.values() for token in read if isinstance(token, _Atom))
        if len(atoms) > _MOST_COMPARISONS:
            raise TooManyError
        grouped: dict[str, list[_Atom]] = {}
        for atom in atoms:
            grouped.setdefault(atom.variable, []).append(atom)
        values: list[list[tuple[bool, ...]]] = []
        for variable, those in grouped.items():
            if those[0].free:
                values.append([(True,), (False,)])
            elif variable == "python":
                values.append(_told_apart(those, _pythons(those, python, requires_python)))
            elif variable == "platform":
                values.append(_told_apart(those, _platforms(those, platform)))
            else:
                words = _words(atom.literal for atom in those)
                values.append(_told_apart(those, [{variable: word} for word in (*words, _OTHER)]))
            if math.prod(map(len, values)) > _MOST:
                raise TooManyError
        self.number = math.prod(map(len, values))
        self.every = (1 << self.number) - 1
        self._where: dict[_Atom, int] = {}
        for position, (those, alike) in enumerate(zip(grouped.values(), values, strict=True)):
            stride = math.prod(map(len, values[position + 1 :]))
            here = [number // stride % len(alike) for number in range(self.number)]
            for column, atom in enumerate(those):
                # Of what is free, all comparisons with the same text are one.
                truth = [truths[0] != atom.negated if atom.free else truths[column] for truths in alike]
                self._where[atom] = sum(1 << number for number, value in enumerate(here) if truth[value])

    def where(self, marker: str) -> int:
        """The set of environments in which one of the markers holds; in all, if it is empty."""
        stack: list[int] = []
        for token in self._read[marker]:
            if isinstance(token, _Atom):
                stack.append(self._where[token])
            else:
                last, first = stack.pop(), stack.pop()
                stack.append(first & last if token == "and" else first | last)
        return stack[0] if stack else self.every


def _postfix(marker: str) -> list[_Atom | str]:
    """A marker in postfix notation, by a loop and a stack: recursion would fail on deeply nested parentheses."""
    if len(marker) > _LONGEST:
        raise TooManyError
    postfix: list[_Atom | str] = []
    waiting: list[str] = []
    expected = True  # a comparison, not what follows one
    tokens = _tokens(marker)
    for kind, text in tokens:
        if expected and kind in ("name", "text"):
            (second, operator), (third, right) = next(tokens, ("", "")), next(tokens, ("", ""))
            if second != "operator" or third not in ("name", "text") or kind == third:
                raise MarkerError(marker)
            postfix.append(_atom(text, " ".join(operator.split()), right, marker))
            expected = False
        elif expected and text == "(":
            waiting.append(text)
        elif not expected and text == ")":
            while waiting and waiting[-1] != "(":
                postfix.append(waiting.pop())
            if not waiting:
                raise MarkerError(marker)
            waiting.pop()
        elif not expected and kind == "word":
            while waiting and waiting[-1] == "and":  # binds more closely
                postfix.append(waiting.pop())
            if text == "or" and waiting and waiting[-1] == "or":
                postfix.append(waiting.pop())
            waiting.append(text)
            expected = True
        else:
            raise MarkerError(marker)
    if (expected and (postfix or waiting)) or "(" in waiting:
        raise MarkerError(marker)
    return [*postfix, *reversed(waiting)]


def _tokens(marker: str) -> Iterator[tuple[str, str]]:
    position, end = 0, len(marker.rstrip())
    while position < end:
        match = _TOKEN.match(marker, position)
        if match is None or match.lastgroup is None:
            raise MarkerError(marker)
        yield match.lastgroup, match[match.lastgroup]
        position = match.end()


def _atom(left: str, operator: str, right: str, marker: str) -> _Atom:
    left, right = _OLD_NAMES.get(left, left), _OLD_NAMES.get(right, right)
    reverse = left[0] in "'\""
    name, literal = (right, left[1:-1]) if reverse else (left, right[1:-1])
    text = f"{left} {operator} {right}"
    if name in ("extra", "extras", "dependency_groups"):
        return _Atom(text, f"{name} {literal}", name, literal, operator in ("!=", "not in"), free=True)
    if name not in _VARIABLES:
        raise MarkerError(marker)
    listed = operator in ("in", "not in")
    if (
        name in _UNLIMITED
        or (listed and reverse)
        or (not listed and operator not in ("==", "!=") and name not in _PYTHON)
    ):
        return _Atom(text, text, name, literal, free=True)
    return _Atom(text, _JOINT.get(name, name), name, literal)


def _told_apart(atoms: Sequence[_Atom], samples: Sequence[Mapping[str, str]]) -> list[tuple[bool, ...]]:
    """Which comparisons hold for each value of a variable; values that all comparisons treat alike are merged."""
    if len(samples) * len(atoms) > _COMPARISONS:
        raise TooManyError
    columns = []
    for atom in atoms:
        try:
            marker = Marker(atom.text)
            columns.append([marker.evaluate(dict(sample)) for sample in samples])
        except (InvalidMarker, UndefinedComparison, UndefinedEnvironmentName, ValueError, KeyError) as error:
            raise MarkerError(atom.text) from error
    return list(dict.fromkeys(zip(*columns, strict=True)))


def _words(literals: Iterable[str]) -> list[str]:
    """The values that a variable is compared with: a literal itself, and where it is a list, what it lists."""
    return list(dict.fromkeys(word for text in literals for word in (text, *re.findall(r"[\w.+-]+", text))))


def _pythons(atoms: Iterable[_Atom], python: str, requires_python: str) -> list[dict[str, str]]:
    """The releases that some comparisons tell apart: those they name, and those before and after them."""
    near = {Version(python or _OLDEST_PYTHON), Version(_USUAL_PYTHON)}
    for number in {
        number for text in (requires_python, *(atom.literal for atom in atoms)) for number in _VERSION.findall(text)
    }:
        major, minor, patch = (*(int(part) for part in number.split(".")), 0, 0)[:3]
        if len(near) > _MOST:
            raise TooManyError
        near |= {
            Version(f"{major}.{max(step, 0)}.{max(last, 0)}")
            for step, last in (
                *((minor - 1, 0), (minor, 0), (minor, 1), (minor + 1, 0)),
                *((minor, patch - 1), (minor, patch), (minor, patch + 1)),
            )
        }
    if python:
        supported = SpecifierSet(f"=={python}.*")
    else:
        supported = _specifiers(requires_python) & SpecifierSet(f">={_OLDEST_PYTHON},<{_BEYOND_PYTHON}")
    return [
        {
            "python_version": f"{release.major}.{release.minor}",
            "python_full_version": f"{release.major}.{release.minor}.{release.micro}",
        }
        for release in sorted(supported.filter(near)) or [Version(python or _USUAL_PYTHON)]
    ]


def _specifiers(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        return SpecifierSet("")


def _platforms(atoms: Sequence[_Atom], platform: str) -> list[dict[str, str]]:
    """The known platforms, and all others that the comparisons may name."""
    if platform:
        return [PLATFORMS[platform]]
    names = PLATFORMS["linux"]
    known = {value for variables in PLATFORMS.values() for value in variables.values()}
    named = {
        name: [word for word in _words(a.literal for a in atoms if a.name == name) if word not in known]
        for name in names
    }
    # Other systems than these three may be posix as well.
    named["os_name"].append("posix")
    every = [(*words, _OTHER) for words in named.values()]
    if math.prod(map(len, every)) > _MOST:
        raise TooManyError
    return [*PLATFORMS.values(), *(dict(zip(names, values, strict=True)) for values in itertools.product(*every))]
