"""What the command line says, checked before anything is run."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterable
from pathlib import Path

from packaging.version import InvalidVersion, Version

from pytest_trlcompat.bisect.candidates.commits import Clone
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.predicate import CommandPredicate, IssuePredicate, Predicate, PytestPredicate
from pytest_trlcompat.bisect.search import Policy
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix.engines import options as engines
from pytest_trlcompat.matrix.engines.options import RayOptions
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import parse_day, parse_pins
from pytest_trlcompat.stack import PACKAGES

__all__ = [
    "check_package",
    "parse_clones",
    "parse_days",
    "parse_engine",
    "parse_held",
    "parse_policy",
    "parse_predicate",
    "parse_version",
    "sort_versions",
]


def parse_predicate(
    options: argparse.Namespace, layout: Layout, folder: Path, *, in_worktree: bool = False
) -> Predicate:
    """What is tested on each candidate.

    Args:
        in_worktree: tests and commands run in a commit's own files.

    Raises:
        BisectError: unless exactly one predicate is named; for an unknown issue.
    """
    named = [name for name in ("issue", "pytest", "command") if getattr(options, name) is not None]
    if len(named) != 1:
        options_named = " and ".join(f"--{name}" for name in named) or "none of them"
        raise BisectError(f"exactly one of --issue, --pytest and --command must say what is bad; found {options_named}")
    if options.strategy != "*" and options.command is not None:
        raise BisectError("--strategy chooses among the checks of --issue or --pytest; --command is a single check")
    if options.issue is not None:
        if in_worktree:
            raise BisectError("--issue needs an environment: name with --package which package the clone is")
        try:
            known_issues.load().get_issue(options.issue)
        except known_issues.CatalogError as error:
            raise BisectError(f"--issue: {error}") from error
        return IssuePredicate(layout, options.issue, options.timeout)
    if options.pytest is not None:
        return PytestPredicate(options.pytest, folder, in_worktree, options.timeout)
    return CommandPredicate(options.command, folder, in_worktree, options.timeout)


def parse_policy(options: argparse.Namespace) -> Policy:
    """
    Raises:
        BisectError: for numbers that make no sense.
    """
    if not 0 <= options.noise < 0.5:
        raise BisectError(f"--noise {options.noise:g}: must be at least 0 and below 0.5, since 0.5 is a coin flip")
    if not 0 < options.confidence < 1:
        raise BisectError(f"--confidence {options.confidence:g}: must be a probability between 0 and 1")
    if options.jobs < 1:
        raise BisectError(f"--jobs {options.jobs}: must be at least 1")
    return Policy(options.find_fix, options.confidence, max_inconclusive=options.max_unknown)


def parse_engine(options: argparse.Namespace) -> RayOptions | None:
    """What tests the candidates: Ray, or ``None`` for this machine alone.

    Raises:
        MatrixError: for options that make no sense, or a predicate that needs this machine's files.
    """
    if not hasattr(options, "engine"):  # commits are in a clone of this machine
        return None
    ray = engines.chosen(options)
    if ray is None:
        return None
    if options.issue is None:
        raise BisectError("--engine ray tests known issues alone (--issue), since nodes lack the files of other tests")
    if options.clone:
        raise BisectError(
            "--clone is for this machine alone; search the releases with --engine ray, then the commits without it"
        )
    return ray


def parse_held(options: argparse.Namespace, *, searched: str | None = None) -> dict[str, str]:
    """The versions held by ``--with``.

    Raises:
        BisectError: when the package that is searched is among them.
    """
    held = parse_pins(options.with_) if options.with_ else {}
    if searched in held:
        raise BisectError(
            f"--with {searched}={held[searched]}: the releases of {searched} are searched, so it cannot be held; "
            "remove it from --with"
        )
    return held


def check_package(name: str) -> str:
    """
    Raises:
        BisectError: for a package outside of the stack.
    """
    if name not in PACKAGES:
        raise BisectError(f"--package {name}: must be one of {', '.join(PACKAGES)}")
    return name


def parse_version(text: str, option: str) -> str:
    """
    Raises:
        BisectError: when it is no version.
    """
    try:
        return str(Version(text))
    except InvalidVersion as error:
        raise BisectError(f"{option} {text}: not a version; write for example {option} 4.51.3") from error


def sort_versions(good: str, bad: str, find_fix: bool) -> tuple[str, str]:
    """The two versions, the earlier one first.

    Raises:
        BisectError: when they are equal, or the wrong one is the earlier.
    """
    first, last = (bad, good) if find_fix else (good, bad)
    if Version(first) == Version(last):
        raise BisectError(f"--good and --bad are both {good}, so there is nothing to search; name two versions")
    if Version(first) > Version(last):
        raise BisectError(_swapped(good, bad, find_fix))
    return first, last


def parse_days(good: str, bad: str, find_fix: bool) -> tuple[datetime.date, datetime.date]:
    """The two days, the earlier one first.

    Raises:
        BisectError: when they are equal, in the future, or the wrong one is the earlier.
    """
    first, last = parse_day(bad if find_fix else good), parse_day(good if find_fix else bad)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    if first == last:
        raise BisectError(f"--good and --bad are both {first}, so there is nothing to search; name two days")
    if first > last:
        raise BisectError(_swapped(good, bad, find_fix))
    if last > today:
        raise BisectError(f"{last} is in the future; today is {today}")
    return first, last


def _swapped(good: str, bad: str, find_fix: bool) -> str:
    if find_fix:
        return (
            f"with --find-fix good must be later than bad, but good {good} is earlier than bad {bad}; swap them, or "
            "remove --find-fix to find what broke it"
        )
    return (
        f"bad must be later than good, but bad {bad} is earlier than good {good}; swap them, or add --find-fix to find "
        "what fixed it"
    )


def parse_clones(texts: Iterable[str]) -> dict[str, Clone]:
    """``["transformers=PATH"]``.

    Raises:
        BisectError: for another form, or a package outside of the stack.
    """
    clones = {}
    for text in texts:
        package, sign, path = text.partition("=")
        if not sign or not path:
            raise BisectError(f"--clone {text}: write PACKAGE=FOLDER, for example transformers=../transformers")
        if package not in PACKAGES:
            raise BisectError(f"--clone {text}: the package must be one of {', '.join(PACKAGES)}")
        clones[package] = Clone(Path(path).expanduser().resolve())
    return clones
