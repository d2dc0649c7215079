"""The command line: ``trlcompat bisect releases | days | commits | test``.

Thin: options, and which room answers them. Imports only the standard library and the rooms below.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pytest_trlcompat.bisect.commands import Asked, commits, days, releases, test
from pytest_trlcompat.bisect.layouts import find_layout
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import explained_os_errors
from pytest_trlcompat.matrix.process import signals_as_ctrl_c

__all__ = ["add_parser", "main"]

_INTERRUPTED = 130
_CANNOT = 2
_SKIP = 125

_DESCRIPTION = """Which release, which package, which commit broke a verdict, or with --find-fix cured it.
Every step is kept: the same command goes on where it stopped. Exit status 0: found; 2: it cannot be found, with the
reason."""

_REST = """the rest of the stack: 'dated' (default) gives each release the versions of its own days, as people had
them, and shares environments with the matrix; what changed beside the release is told from it afterwards. 'fixed' holds
the versions of the newest one, which moves nothing else but may not go together with older ones"""


def add_parser(subparsers: Any) -> None:
    """Add ``bisect`` to a program's subcommands; the parsed arguments carry ``run``, to be called with them."""
    parser = subparsers.add_parser(
        "bisect", help="which release, package or commit broke or cured a verdict", description=_DESCRIPTION
    )
    parser.set_defaults(run=_run)
    _fill(parser)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _Parser(prog="trlcompat bisect", description=_DESCRIPTION)
    _fill(parser)
    return _run(parser.parse_args(given), given)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_CANNOT, f"{self.prog}: {message}\n{self.format_usage()}")


def _fill(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{releases,days,commits,test}")

    one = kinds.add_parser("releases", help="search the releases of one package", allow_abbrev=False)
    one.add_argument("--package", required=True, help="whose releases are searched")
    _ends(one, "VERSION")
    one.add_argument("--rest", choices=("dated", "fixed"), default="dated", help=_REST)
    one.add_argument("--pre", action="store_true", help="take pre-releases as well")
    one.add_argument("--yanked", action="store_true", help="take withdrawn releases as well")
    _clones(one)
    _common(one)

    one = kinds.add_parser(
        "days", help="search the stack as the registry stood on each day; names package and release", allow_abbrev=False
    )
    _ends(one, "DAY")
    _clones(one)
    _common(one)

    one = kinds.add_parser("commits", help="search the commits of a local clone", allow_abbrev=False)
    one.add_argument("--clone", required=True, metavar="FOLDER", help="a git clone; what is checked out is not touched")
    one.add_argument(
        "--package", help="which package of the stack it is; without, commands run in a commit's own files"
    )
    _ends(one, "REVISION")
    one.add_argument("--allow-dirty", action="store_true", help="leave changes that are not committed out")
    _common(one)

    one = kinds.add_parser(
        "test",
        help="answer for the clone's HEAD by exit status, as the command of `git bisect run`: "
        "0 good, 1 bad, 125 cannot tell",
        allow_abbrev=False,
    )
    one.add_argument("--clone", default=".", metavar="FOLDER", help="a git clone (default: the current folder)")
    one.add_argument(
        "--package", help="which package of the stack it is; without, commands run in a commit's own files"
    )
    one.add_argument("--allow-dirty", action="store_true", help="leave changes that are not committed out")
    _predicate(one)


def _ends(parser: argparse.ArgumentParser, metavar: str) -> None:
    parser.add_argument("--good", required=True, metavar=metavar)
    parser.add_argument("--bad", required=True, metavar=metavar)
    parser.add_argument("--find-fix", action="store_true", help="find what cured it: good is the later one")


def _clones(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clone",
        action="append",
        default=[],
        metavar="PACKAGE=FOLDER",
        help="a local git clone, in which the commit is found when it was this package",
    )
    parser.add_argument("--allow-dirty", action="store_true", help="leave a clone's changes that are not committed out")


def _predicate(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is bad")
    what.add_argument("--issue", metavar="ID", help="the verdict of a known issue's suite, of TRL's own trainer")
    what.add_argument("--strategy", default="*", metavar="PATTERN", help="look at these strategies, or tests, only")
    what.add_argument("--pytest", metavar="TEXT", help="a pytest test: node ids and options as on its command line")
    what.add_argument("--command", metavar="TEXT", help="a shell command: 0 is good, 125 cannot tell, else bad")
    what.add_argument("--expect", default="", metavar="TEXT", help="the failure must contain this, else it is another")
    what.add_argument("--timeout", type=float, metavar="SECONDS", help="a run that takes longer hangs")
    where = parser.add_argument_group("where")
    where.add_argument(
        "--with", dest="with_", action="extend", nargs="+", default=[], metavar="PACKAGE=VERSION", help="held versions"
    )
    where.add_argument("--fresh", action="store_true", help="forget what earlier commands saw of this predicate")
    where.add_argument("--state", type=Path, metavar="FOLDER", help="where steps are kept (default: build/bisect)")
    where.add_argument("--called-as", default="trlcompat bisect", help=argparse.SUPPRESS)


def _common(parser: argparse.ArgumentParser) -> None:
    _predicate(parser)
    how = parser.add_argument_group("how")
    how.add_argument("--jobs", type=int, default=1, metavar="N", help="test the next possible candidates ahead of time")
    how.add_argument("--noise", type=float, default=0.001, metavar="P", help="probability that an answer is wrong")
    how.add_argument(
        "--confidence", type=float, default=0.9, metavar="P", help="ask doubtful answers again until this is reached"
    )
    how.add_argument(
        "--max-unknown", type=int, default=12, metavar="N", help="give a range after so many that cannot tell"
    )
    out = parser.add_argument_group("result")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the result and every step there")
    out.add_argument("--report", type=Path, metavar="FILE", help="write the Markdown report there as well")


def _run(parsed: argparse.Namespace, given: Sequence[str] | None = None) -> int:
    words = list(sys.argv[2:] if given is None else given)
    words = [word for word in _without(words, ["--called-as"]) if word != "--fresh"]
    command = f"{parsed.called_as} {shlex.join(words)}"
    reproduce = f"trlcompat bisect {shlex.join(_without(words, ('--json', '--report', '--state', '--jobs')))}"
    say = partial(print, flush=True)
    try:
        with explained_os_errors(), signals_as_ctrl_c():
            asked = Asked(parsed, find_layout(), Path.cwd(), command, reproduce, say)
            return {"releases": releases, "days": days, "commits": commits, "test": test}[parsed.kind](asked)
    except MatrixError as error:
        print(f"trlcompat bisect: {error}", file=sys.stderr)
        return _SKIP if parsed.kind == "test" else _CANNOT
    except KeyboardInterrupt:
        print(f"\nstopped; every finished step is kept, this goes on after them:\n  {command}", file=sys.stderr)
        return _INTERRUPTED


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command line without some options and their values."""
    kept = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in options:
            skip = True
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
    return kept
