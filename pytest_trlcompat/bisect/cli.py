"""The command line: ``trlcompat bisect releases | days | commits | test``."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pytest_trlcompat._escaping import printable
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.bisect import leftovers
from pytest_trlcompat.bisect.commands import Request, commits, days, releases, test
from pytest_trlcompat.bisect.layouts import find_layout
from pytest_trlcompat.matrix.engines import options as engines
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import explained_os_errors
from pytest_trlcompat.matrix.process import signals_as_ctrl_c

__all__ = ["main"]

# 128 and the number of SIGINT, as shells have it.
_INTERRUPTED = 130
_FAILED = 2
# `git bisect run` skips a commit for which its command ends so.
_SKIP = 125

_COMMANDS = {"releases": releases, "days": days, "commits": commits, "test": test}

_DESCRIPTION = """Find the release, package or commit that broke a verdict, or with --find-fix the one that fixed it.
Every step is kept: the same command continues where it was interrupted. Exit status 0: found; 2: not found, with the
reason."""

_OF_THIS_MACHINE = ("--json", "--report", "--state", "--jobs", *engines.NAMES)
"""Options that do not change what is found."""

_REST = """the other packages of the stack. 'dated' (default): each release is tested with what was current when it came
out, in environments shared with the matrix; if other packages changed as well, a final test separates them. 'fixed':
all releases are tested with the versions that go with the newest one, which may be incompatible with older releases"""

_PACKAGE = "which package of the stack the clone is; without it, commands run in a commit's own files"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _Parser(prog="trlcompat bisect", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="kind", required=True, metavar="{releases,days,commits,test}")
    _add_releases(commands)
    _add_days(commands)
    _add_commits(commands)
    _add_test(commands)
    return _run(parser.parse_args(words), words)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_FAILED, f"{self.prog}: {message}\n{self.format_usage()}")


def _add_releases(commands: Any) -> None:
    command = _add(commands, "releases", "search the releases of one package")
    command.add_argument("--package", required=True, help="the package whose releases are searched")
    _add_ends(command, "VERSION")
    command.add_argument("--rest", choices=("dated", "fixed"), default="dated", help=_REST)
    command.add_argument("--pre", action="store_true", help="include pre-releases")
    command.add_argument("--yanked", action="store_true", help="include yanked releases")
    _add_clones(command)
    _add_predicate(command)
    _add_search(command)
    _add_engine(command)


def _add_days(commands: Any) -> None:
    command = _add(
        commands, "days", "search the whole stack day by day, as the registry was; names the package and its release"
    )
    _add_ends(command, "DAY")
    _add_clones(command)
    _add_predicate(command)
    _add_search(command)
    _add_engine(command)


def _add_commits(commands: Any) -> None:
    command = _add(commands, "commits", "search the commits of a local git clone")
    command.add_argument("--clone", required=True, metavar="FOLDER", help="a git clone; its checkout is not touched")
    command.add_argument("--package", help=_PACKAGE)
    _add_ends(command, "REVISION")
    command.add_argument("--allow-dirty", action="store_true", help="ignore uncommitted changes")
    _add_predicate(command)
    _add_search(command)


def _add_test(commands: Any) -> None:
    command = _add(
        commands,
        "test",
        "test the clone's HEAD, as the command of `git bisect run`: exit status 0 good, 1 bad, 125 inconclusive",
    )
    command.add_argument("--clone", default=".", metavar="FOLDER", help="a git clone (default: the current folder)")
    command.add_argument("--package", help=_PACKAGE)
    command.add_argument("--allow-dirty", action="store_true", help="ignore uncommitted changes")
    _add_predicate(command)


def _add(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False
    )
    return parser


def _add_ends(parser: argparse.ArgumentParser, metavar: str) -> None:
    parser.add_argument("--good", required=True, metavar=metavar, help="where it works")
    parser.add_argument("--bad", required=True, metavar=metavar, help="where it fails")
    parser.add_argument("--find-fix", action="store_true", help="find what fixed it: good is later than bad")


def _add_clones(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clone",
        action="append",
        default=[],
        metavar="PACKAGE=FOLDER",
        help="a local git clone of a package: if that package is the culprit, its commits are searched too",
    )
    parser.add_argument("--allow-dirty", action="store_true", help="ignore uncommitted changes in a clone")


def _add_predicate(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is tested (exactly one of --issue, --pytest, --command)")
    what.add_argument("--issue", metavar="ID", help="a known issue's suite, with TRL's own trainer")
    what.add_argument("--pytest", metavar="TEXT", help="a pytest test: node ids and options as for pytest")
    what.add_argument(
        "--command", metavar="TEXT", help="a shell command: 0 is good, 125 to 127 are inconclusive, others are bad"
    )
    what.add_argument(
        "--strategy", default="*", metavar="PATTERN", help="consider only strategies or tests whose names match"
    )
    what.add_argument("--expect", default="", metavar="TEXT", help="only a failure that contains this text is meant")
    what.add_argument("--timeout", type=float, metavar="SECONDS", help="a run that takes longer counts as a hang")
    where = parser.add_argument_group("where")
    where.add_argument(
        "--with",
        dest="with_",
        action="extend",
        nargs="+",
        default=[],
        metavar="PACKAGE=VERSION",
        help="versions that are the same for every candidate",
    )
    where.add_argument("--fresh", action="store_true", help="discard the steps that earlier commands have kept")
    where.add_argument("--state", type=Path, metavar="FOLDER", help="where steps are kept (default: build/bisect)")
    where.add_argument("--called-as", default="trlcompat bisect", help=argparse.SUPPRESS)


def _add_search(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how")
    how.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="test N candidates at a time, the next possible ones ahead"
    )
    how.add_argument(
        "--noise", type=float, default=0.001, metavar="P", help="probability that an answer is wrong (default: 0.001)"
    )
    how.add_argument(
        "--confidence",
        type=float,
        default=0.9,
        metavar="P",
        help="test doubtful candidates again until this confidence is reached (default: 0.9)",
    )
    how.add_argument(
        "--max-unknown",
        type=int,
        default=12,
        metavar="N",
        help="give a range of candidates after N inconclusive ones (default: 12)",
    )
    out = parser.add_argument_group("result")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the result and every step to this file")
    out.add_argument("--report", type=Path, metavar="FILE", help="also write the Markdown report to this file")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engines.add_arguments(
        parser.add_argument_group(
            "engine",
            "--engine ray tests the candidates of --issue on a cluster of Ray: docs/how-to/ray.md has its options",
        )
    )


def _run(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    # With --fresh the command that continues would first discard what it is to continue.
    again = [word for word in _without(words, ["--called-as"]) if word != "--fresh"]
    command = f"{parsed.called_as} {shlex.join(again)}"
    reproduce = f"trlcompat bisect {shlex.join(_anywhere(_without(again, _OF_THIS_MACHINE)))}"
    try:
        with explained_os_errors(), signals_as_ctrl_c(), contextlib.ExitStack() as resources:
            request = Request(parsed, find_layout(), Path.cwd(), command, reproduce, _say, resources)
            with leftovers.removed(request.state, request.named_clones()):
                return _COMMANDS[parsed.kind](request)
    except MatrixError as error:
        print(printable(redacted(f"trlcompat bisect: {error}")), file=sys.stderr)
        return _SKIP if parsed.kind == "test" else _FAILED
    except KeyboardInterrupt:
        print(f"\nstopped; every finished step is kept. To continue:\n  {command}", file=sys.stderr)
        return _INTERRUPTED


def _anywhere(words: Sequence[str]) -> list[str]:
    """A command line whose clones are not where they are on this machine."""
    moved = list(words)
    for number, word in enumerate(moved):
        after = number > 0 and moved[number - 1] == "--clone"
        option, value = ("", word) if after else ("--clone=", word.removeprefix("--clone="))
        if after or word.startswith(option):
            package, sign, folder = value.rpartition("=")
            if Path(folder).is_absolute():
                moved[number] = f"{option}{package}{sign}/path/to/{Path(folder).name}"
    return moved


def _say(text: str) -> None:
    print(printable(redacted(text)), flush=True)


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command line without some options and their values."""
    rest = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in options:
            skip = True
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            rest.append(word)
    return rest
