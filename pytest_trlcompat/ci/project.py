"""What a project says about itself that its continuous integration must know: versions, Pythons, tests.

Its files are read, nothing of it is run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from pytest_trlcompat.ci.errors import CiError
from pytest_trlcompat.stack import PACKAGES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["PYTHONS", "Project", "read_project"]

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""On which this package runs."""
_DEFAULT_PYTHON = "3.11"
_PATTERNS = ("requirements*.txt", "requirements/*.txt", "locks/*.txt")
_PIN = re.compile(rf"(?:{'|'.join(PACKAGES)})\s*(?:\[[^\]]*\])?\s*===?\s*\d", re.IGNORECASE)
"""A line of a requirements file that says which release of a package of the stack is meant."""
_FOR_TESTS = re.compile(r"(?:^|[-_/])(?:test|tests|testing|dev|develop)(?:[-_.]|$)", re.IGNORECASE)
_GROUPS = ("test", "tests", "testing", "dev")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+-]*")
"""Paths that need no quotes: in YAML, in a shell, and as a pattern."""
_MOST_BYTES = 2**20
_MOST_JOBS = 200
"""Of one matrix: GitHub allows 256, GitLab 200."""


@dataclass(frozen=True)
class Project:
    """A project as its files describe it.

    Attributes:
        stacks: files that say which versions are meant, each for a job of its own: ``uv.lock``, ``pylock.toml`` or
            requirements files; none where ``pyproject.toml`` alone says what is needed.
        more: requirements files that are installed as well, such as ``requirements-test.txt``.
        extra, group: of ``pyproject.toml``, what holds the requirements of its tests; may be empty.
        installed: whether the project itself is to be installed.
        pythons: one job for each.
        tests: the arguments of pytest.
        why: in a line each, from what this follows.
    """

    stacks: tuple[str, ...]
    more: tuple[str, ...]
    extra: str
    group: str
    installed: bool
    pythons: tuple[str, ...]
    tests: tuple[str, ...]
    why: tuple[str, ...]


def read_project(root: Path) -> Project:
    """Read the files of a project.

    Raises:
        CiError: they do not say what is to be installed, or cannot be read.
    """
    pyproject = _pyproject(root)
    metadata = _table(pyproject, "project")
    stacks, more = _stacks(root, metadata)
    locked = stacks in (("uv.lock",), ("pylock.toml",))
    extra = _first(_table(metadata, "optional-dependencies"))
    group = "" if extra else _first(_table(pyproject, "dependency-groups"))
    installed = bool(metadata) or (root / "setup.py").is_file()
    pythons, because = _pythons(root, metadata)
    if len(pythons) * len(stacks) > _MOST_JOBS:
        raise CiError(
            f"{len(stacks)} requirements files on {len(pythons)} Pythons are more than the {_MOST_JOBS} jobs that "
            "GitHub and GitLab allow: name one Python in .python-version, or move files elsewhere"
        )
    tests, where = _tests(root, pyproject)
    what = ", ".join(stacks) if stacks else "pyproject.toml"
    why = [f"versions: {what}{', a job for each' if len(stacks) > 1 else ''}"]
    if more and not locked:
        why.append(f"also installed: {', '.join(more)}")
    if extra or group:
        why.append(f"requirements of the tests: the {'extra' if extra else 'dependency group'} {extra or group}")
    why += [f"Python: {', '.join(pythons)} ({because})", f"tests: {' '.join(tests) or 'what pytest finds'} ({where})"]
    return Project(stacks, () if locked else more, extra, group, installed, pythons, tests, tuple(why))


def _stacks(root: Path, metadata: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    files = {path for pattern in _PATTERNS for path in root.glob(pattern) if path.is_file()}
    names = {_named(name): root / name for name in sorted(path.relative_to(root).as_posix() for path in files)}
    for_tests = tuple(name for name in names if _FOR_TESTS.search(name))
    pinned = tuple(name for name, path in names.items() if name not in for_tests and _pins(_text(path)))
    locks = tuple(name for name in ("uv.lock", "pylock.toml") if (root / name).is_file())
    if len(pinned) > 1:
        return pinned, for_tests
    if locks:
        return locks[:1], ()
    if pinned or "requirements.txt" in names:
        return pinned or ("requirements.txt",), for_tests
    # uv installs from neither.
    foreign = {
        "poetry.lock": "poetry export -o requirements.txt",
        "Pipfile.lock": "pipenv requirements > requirements.txt",
    }
    for name, command in foreign.items():
        if (root / name).is_file():
            raise CiError(f"{name} is the lock of another installer: write it as requirements, `{command}`")
    if metadata or (root / "setup.py").is_file():
        return (), for_tests
    raise CiError(
        f"{root} does not say what is to be installed: there is no uv.lock, pylock.toml, requirements.txt, "
        "requirements/*.txt, locks/*.txt, setup.py, nor a pyproject.toml with [project]; "
        "write one, `pip freeze > requirements.txt` where it works"
    )


def _pins(text: str) -> bool:
    return any(_PIN.match(line.strip()) for line in text.splitlines())


def _named(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise CiError(
            f"{name!r} has characters that a shell or a pattern would read otherwise: give the file another name"
        )
    return name


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CiError(f"{path} has more than {_MOST_BYTES // 2**20} MiB")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CiError(f"{path} cannot be read: {error}") from error


def _pyproject(root: Path) -> Mapping[str, Any]:
    path = root / "pyproject.toml"
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise CiError(f"{path} is not TOML: {error}") from error


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = document.get(name)
    return table if isinstance(table, dict) else {}


def _first(groups: Mapping[str, Any]) -> str:
    return next((name for name in _GROUPS if name in groups), "")


def _pythons(root: Path, metadata: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """One, or those that it says it supports, and where it says so."""
    pinned = root / ".python-version"
    if pinned.is_file():
        words = [word for line in _text(pinned).splitlines() for word in line.partition("#")[0].split()]
        match = re.fullmatch(r"(?:c?python[@-]?)?(3\.\d+)(?:\.\d+)?.*", words[0]) if words else None
        if match is None or match[1] not in PYTHONS:
            raise CiError(
                f"{pinned} names {words[0] if words else 'nothing'}; pytest-trlcompat runs on {_listed(PYTHONS)}"
            )
        return (match[1],), ".python-version"
    classified = tuple(_classified(metadata.get("classifiers", ())))
    required = str(metadata.get("requires-python", ""))
    try:
        # The last patch release of a minor one: >=3.11.4 admits 3.11.
        admitted = tuple(python for python in PYTHONS if f"{python}.99" in SpecifierSet(required))
    except InvalidSpecifier as error:
        raise CiError(f"pyproject.toml: requires-python is no range of versions: {required!r}") from error
    if not admitted:
        raise CiError(f"pyproject.toml asks for Python {required}; pytest-trlcompat runs on {_listed(PYTHONS)}")
    if both := tuple(python for python in classified if python in admitted):
        return both, "the classifiers of pyproject.toml"
    if required:
        return tuple(dict.fromkeys((admitted[0], admitted[-1]))), "the oldest and the newest of requires-python"
    return (_DEFAULT_PYTHON,), "nothing says which"


def _classified(classifiers: object) -> Iterator[str]:
    for classifier in classifiers if isinstance(classifiers, list) else ():
        python = str(classifier).rpartition(" :: ")[2]
        if str(classifier).startswith("Programming Language :: Python :: ") and python in PYTHONS:
            yield python


def _listed(names: Sequence[str]) -> str:
    return f"{names[0]} to {names[-1]}"


def _tests(root: Path, pyproject: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    options = _table(_table(_table(pyproject, "tool"), "pytest"), "ini_options")
    if options.get("testpaths"):
        return (), "testpaths of pyproject.toml"
    name = next((name for name in ("tests", "test") if (root / name).is_dir()), "")
    return ((name,), "a folder of that name") if name else ((), "nothing says which")
