"""What follows ``nox -s watch --``."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.parsing import parse_day
from pytest_trlcompat.stack import REQUIRED
from pytest_trlcompat.watch.commits import AskedCommit, parse_commit
from pytest_trlcompat.watch.running import Scope

__all__ = ["Options", "parse"]

_ABOUT = """Ask the package index for releases that the matrix does not know, run the suites with them, hold the
verdicts against the catalogue, and bisect what nothing predicts. Leaves build/watch/DAY/report.md and .html, and a
patch for a person to review. Every finished step is kept: the same command goes on after the last one."""


@dataclass(frozen=True)
class Options:
    """What a watch is asked to do.

    Attributes:
        packages: whose releases are watched.
        day: the index is seen as it was when this day began.
        since: of a watch on a past, the day to which the matrix and the catalogue are cut back; else ``None``.
        minutes, gigabytes: what it may use; ``None``: as much as it takes.
        clones: ``PACKAGE=FOLDER`` of local git clones, in which a bisection goes on to the commit.
        commits: of local git clones, each tried like a new release.
        narrow: bisect what nothing predicts.
        list_only: say what is new and which cells follow, and run nothing.
        keep: leave the environments.
    """

    packages: tuple[str, ...]
    day: datetime.date
    since: datetime.date | None
    scope: Scope
    minutes: float | None
    gigabytes: float | None
    prereleases: bool
    clones: tuple[str, ...]
    commits: tuple[AskedCommit, ...]
    narrow: bool
    list_only: bool
    keep: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MatrixError(f"{message}\n{self.format_usage().strip()}")


def parse(words: Sequence[str], today: datetime.date) -> Options:
    """Read a command line.

    Raises:
        MatrixError: for what makes no sense, with the usage.
    """
    parser = _Parser(prog="nox -s watch --", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--package", action="append", choices=REQUIRED, help="watch this package (default: all)")
    parser.add_argument("--minutes", type=float, help="stop after so many; the next command goes on")
    parser.add_argument("--gigabytes", type=float, help="build no other environment once so many are used")
    parser.add_argument("--pre", action="store_true", help="pre-releases as well")
    parser.add_argument(
        "--clone", action="append", default=[], metavar="PACKAGE=FOLDER", help="a git clone, to bisect to the commit"
    )
    parser.add_argument(
        "--commit",
        action="append",
        default=[],
        metavar="PACKAGE=FOLDER[@REVISION]",
        help="try this commit of a git clone as well (default: the one that is checked out)",
    )
    parser.add_argument("--issue", action="append", default=[], metavar="ID", help="only the suites of this issue")
    parser.add_argument("--every-pair", action="store_true", help="conformance rows for every pair of settings as well")
    parser.add_argument("--no-conformance", action="store_true", help="without the conformance suites")
    parser.add_argument("--no-bisect", action="store_true", help="do not search for what nothing predicts")
    parser.add_argument("--list", action="store_true", help="say what is new and which cells follow, and run nothing")
    parser.add_argument("--keep-environments", action="store_true", help="do not remove those that were built")
    parser.add_argument("--as-of", metavar="DAY", help="ask the index as it was when this day began")
    parser.add_argument(
        "--since", metavar="DAY", help="of --as-of: cut matrix and catalogue back to this day (default: the day before)"
    )
    parsed = parser.parse_args(list(words))
    for issue in parsed.issue:
        try:
            known_issues.load().get_issue(issue)
        except known_issues.CatalogError as error:
            raise MatrixError(f"--issue: {error}") from error
    for name in ("minutes", "gigabytes"):
        value = getattr(parsed, name)
        if value is not None and not value > 0:
            raise MatrixError(f"--{name} {value:g}: must be more than nothing")
    day, since = _days(parsed.as_of, parsed.since, today)
    return Options(
        packages=tuple(parsed.package or REQUIRED),
        day=day,
        since=since,
        scope=Scope(tuple(sorted(parsed.issue)), not parsed.no_conformance, parsed.every_pair),
        minutes=parsed.minutes,
        gigabytes=parsed.gigabytes,
        prereleases=parsed.pre,
        clones=tuple(parsed.clone),
        commits=_commits(parsed.commit),
        narrow=not parsed.no_bisect,
        list_only=parsed.list,
        keep=parsed.keep_environments,
    )


def _commits(texts: Sequence[str]) -> tuple[AskedCommit, ...]:
    commits = tuple(map(parse_commit, texts))
    named = [commit.package for commit in commits]
    if twice := sorted({package for package in named if named.count(package) > 1}):
        raise MatrixError(f"--commit names {twice[0]} more than once; run a watch for each commit")
    return commits


def _days(as_of: str | None, since: str | None, today: datetime.date) -> tuple[datetime.date, datetime.date | None]:
    if as_of is None:
        if since is not None:
            raise MatrixError("--since belongs to --as-of, the day on which the index is asked")
        return today, None
    day = parse_day(as_of)
    first = parse_day(since) if since is not None else day - datetime.timedelta(days=1)
    if day > today:
        raise MatrixError(f"--as-of {day} is in the future; today is {today}")
    if first >= day:
        raise MatrixError(f"--since {first} must be before --as-of {day}")
    return day, first
