"""The question: what the command line asks, checked before anything is run.

Imports only the standard library, ``packaging``, the catalogue and the matrix.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterable
from pathlib import Path

from packaging.version import InvalidVersion, Version

from pytest_trlcompat.bisect.candidates.git import Clone
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.predicate import CommandPredicate, IssuePredicate, Predicate, PytestPredicate
from pytest_trlcompat.bisect.search import Policy
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import parse_day, parse_pins
from pytest_trlcompat.stack import PACKAGES

__all__ = ["check_days", "check_order", "clones", "find_predicate", "package_of", "pins", "policy", "version_of"]


def find_predicate(asked: argparse.Namespace, layout: Layout, folder: Path, *, in_place: bool = False) -> Predicate:
    """What is asked of each candidate.

    Args:
        in_place: tests and commands run in a commit's own files.

    Raises:
        BisectError: unless exactly one thing is asked, of a known issue.
    """
    given = [name for name in ("issue", "pytest", "command") if getattr(asked, name) is not None]
    if len(given) != 1:
        found = " and ".join(f"--{name}" for name in given) or "none of them"
        raise BisectError(f"one of --issue ID, --pytest TEXT and --command TEXT says what is bad; found: {found}")
    if asked.strategy != "*" and asked.command is not None:
        raise BisectError("--strategy chooses among the checks of a suite; a command is one check")
    if asked.issue is not None:
        if in_place:
            raise BisectError("--issue needs an environment: say with --package which package the clone is")
        try:
            known_issues.load().get_issue(asked.issue)
        except known_issues.CatalogError as error:
            raise BisectError(f"--issue: {error}") from error
        return IssuePredicate(layout, asked.issue, asked.timeout)
    if asked.pytest is not None:
        return PytestPredicate(asked.pytest, folder, in_place, asked.timeout)
    return CommandPredicate(asked.command, folder, in_place, asked.timeout)


def policy(asked: argparse.Namespace) -> Policy:
    """
    Raises:
        BisectError: for numbers that make no sense.
    """
    if not 0 <= asked.noise < 0.5:
        raise BisectError(f"--noise {asked.noise:g}: a probability below 0.5 is meant; answers of a coin tell nothing")
    if not 0 < asked.confidence < 1:
        raise BisectError(f"--confidence {asked.confidence:g}: a probability between 0 and 1 is meant")
    if asked.jobs < 1:
        raise BisectError(f"--jobs {asked.jobs}: at least 1 is meant")
    return Policy(asked.find_fix, asked.confidence, max_unknown=asked.max_unknown)


def pins(asked: argparse.Namespace, *, free: Iterable[str] = ()) -> dict[str, str]:
    """The versions held by ``--with``.

    Args:
        free: packages that are searched, and so cannot be held.
    """
    held = parse_pins(asked.with_) if asked.with_ else {}
    for package in free:
        if package in held:
            raise BisectError(
                f"--with {package}={held[package]}: {package} is what is searched; leave it out of --with"
            )
    return held


def package_of(text: str) -> str:
    """
    Raises:
        BisectError: for a package outside of the stack.
    """
    if text not in PACKAGES:
        raise BisectError(f"--package {text}: the stack has {', '.join(PACKAGES)}")
    return text


def version_of(text: str, option: str) -> str:
    """
    Raises:
        BisectError: when it is no version.
    """
    try:
        return str(Version(text))
    except InvalidVersion as error:
        raise BisectError(f"{option} {text}: not a version; write for example {option} 4.51.3") from error


def check_order(good: str, bad: str, find_fix: bool) -> tuple[str, str]:
    """The two versions, the earlier one first.

    Raises:
        BisectError: when they are equal, or the wrong one is the earlier.
    """
    first, last = (bad, good) if find_fix else (good, bad)
    if Version(first) == Version(last):
        raise BisectError(f"good and bad are both {good}; there is nothing to search, name two different ends")
    if Version(first) > Version(last):
        raise BisectError(_swapped(good, bad, find_fix))
    return first, last


def check_days(good: str, bad: str, find_fix: bool) -> tuple[datetime.date, datetime.date]:
    """The two days, the earlier one first.

    Raises:
        BisectError: when they are equal, in the future, or the wrong one is the earlier.
    """
    first, last = parse_day(bad if find_fix else good), parse_day(good if find_fix else bad)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    if first == last:
        raise BisectError(f"good and bad are both {first}; there is nothing to search, name two different days")
    if first > last:
        raise BisectError(_swapped(good, bad, find_fix))
    if last > today:
        raise BisectError(f"{last} is in the future; today is {today}")
    return first, last


def _swapped(good: str, bad: str, find_fix: bool) -> str:
    if find_fix:
        return (
            f"with --find-fix the good one comes after the bad one, but good {good} comes before bad {bad}; "
            "swap them, or leave --find-fix away to find what broke it"
        )
    return (
        f"the bad one comes after the good one, but bad {bad} comes before good {good}; swap them, or add --find-fix "
        "to find what cured it"
    )


def clones(texts: Iterable[str]) -> dict[str, Clone]:
    """``["transformers=PATH"]``.

    Raises:
        BisectError: for another form, or a package outside of the stack.
    """
    found = {}
    for text in texts:
        package, sign, path = text.partition("=")
        if not sign or not path:
            raise BisectError(f"--clone {text}: write PACKAGE=FOLDER, for example transformers=../transformers")
        if package not in PACKAGES:
            raise BisectError(f"--clone {text}: the stack has {', '.join(PACKAGES)}")
        found[package] = Clone(Path(path).expanduser().resolve())
    return found
