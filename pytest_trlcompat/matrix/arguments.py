"""The arguments after ``--`` of the sessions ``matrix`` and ``cell``."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix import torch_axis
from pytest_trlcompat.matrix.cells import ADDED_TAGS
from pytest_trlcompat.matrix.engines import options as engine_options
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.parsing import parse_day
from pytest_trlcompat.matrix.shards import SHARD, requested_shard

__all__ = [
    "FULL",
    "PAIRWISE",
    "PYTHON",
    "STRENGTH",
    "TABLES",
    "Arguments",
    "parse_arguments",
    "requested_added",
    "requested_pairwise",
]

FULL = "--full"
"""Option of ``matrix``: the full selection of cells instead of the default ones, and more tests of the suites."""

PAIRWISE = "--pairwise"
"""Option of ``matrix``: the cells that covering arrays have chosen, so that each release has one."""

STRENGTH = "--pairwise-strength"
"""Option of ``matrix``: 1 is :data:`PAIRWISE`; with 2 each pair of releases has a cell."""

TABLES = "--tables"
"""Option of ``matrix`` and ``cell``: at the end the tables of all issues instead of the summary."""

PYTHON = "--python"
"""Option of the session ``cell``: the interpreter, as uv understands it."""


@dataclass(frozen=True)
class Arguments:
    """The arguments after ``--`` of the sessions ``matrix`` and ``cell``."""

    positional: tuple[str, ...]
    issues: tuple[str, ...]
    date: datetime.date | None
    fresh: bool
    full: bool
    pairwise: int
    torch: str | None
    python: str | None
    shard: tuple[int, int] | None
    ray: engine_options.RayOptions | None
    added: str
    pytest_arguments: tuple[str, ...]


_USAGE = {
    "matrix": (
        "nox -s matrix -- [--full] [--pairwise] [--pairwise-strength 2] [--torch dated|VERSION] [--vllm | --liger | "
        "--images] [--issue ID ...] [--fresh] [--tables] [--shard 3/16] [--engine ray ...] [-- PYTEST ARGUMENTS]"
    ),
    "cell": (
        "nox -s cell -- PACKAGE=VERSION ... [--torch dated] [--python 3.12] [--issue ID ...] [--date DAY] [--fresh] "
        "[--tables] [--engine ray ...] [-- PYTEST ARGUMENTS]"
    ),
}


class _Parser(argparse.ArgumentParser):
    # argparse would print the message and end the process; a session of nox shows the text of a MatrixError.
    def error(self, message: str) -> NoReturn:
        raise MatrixError(f"{message}\n{self.format_usage().strip()}")


def parse_arguments(session: str, arguments: Sequence[str]) -> Arguments:
    """Parse the arguments after ``--``; those after a second ``--`` are passed to pytest."""
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    ours, for_pytest = list(arguments[:cut]), tuple(arguments[cut + 1 :])
    # No abbreviations: requested_pairwise and requested_added look for the full names among the same words.
    parser = _Parser(usage=_USAGE[session], add_help=False, allow_abbrev=False)
    parser.add_argument("positional", nargs="*")
    parser.add_argument("--issue", action="append", default=[])
    parser.add_argument("--date")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument(FULL, action="store_true")
    parser.add_argument(PAIRWISE, action="store_true")
    for tag in ADDED_TAGS:
        parser.add_argument(f"--{tag}", action="store_true")
    parser.add_argument(STRENGTH)
    parser.add_argument(TABLES, action="store_true")
    parser.add_argument(torch_axis.OPTION)
    parser.add_argument(PYTHON)
    parser.add_argument(SHARD)
    engine_options.add_arguments(parser)
    # Pins and options may alternate: trl=0.19.1 --fresh transformers=4.53.3.
    parsed = parser.parse_intermixed_args(ours)
    for issue in parsed.issue:
        # Checked here, since a cell that runs in vain loses its earlier verdicts.
        try:
            known_issues.load().get_issue(issue)
        except known_issues.CatalogError as error:
            raise MatrixError(f"--issue: {error}") from error
    date = parse_day(parsed.date) if parsed.date else None
    return Arguments(
        tuple(parsed.positional),
        tuple(parsed.issue),
        date,
        parsed.fresh,
        parsed.full,
        requested_pairwise(ours),
        parsed.torch,
        parsed.python,
        requested_shard(ours),
        engine_options.chosen(parsed),
        requested_added(ours),
        for_pytest,
    )


def requested_added(arguments: Sequence[str]) -> str:
    """The one of :data:`~pytest_trlcompat.matrix.cells.ADDED_TAGS` whose cells the arguments ask for; empty for none.

    Raises:
        MatrixError: for several.
    """
    asked = [tag for tag in ADDED_TAGS if f"--{tag}" in arguments]
    if len(asked) > 1:
        raise MatrixError(
            f"{' and '.join(f'--{tag}' for tag in asked)} are selections of their own; run one after the other"
        )
    return "".join(asked)


def requested_pairwise(arguments: Sequence[str]) -> int:
    """The strength of the covering arrays whose cells the arguments of a session ask for; 0 for none.

    Raises:
        MatrixError: for another strength than 1 or 2.
    """
    # Without the parser: nox lists sessions by the arguments of whichever session was asked for, bisect's say, and only
    # that session can parse them.
    strength = 1 if PAIRWISE in arguments else 0
    for index, argument in enumerate(arguments):
        if argument.partition("=")[0] == STRENGTH:
            value = argument.partition("=")[2] or "".join(arguments[index + 1 : index + 2])
            if value not in ("1", "2"):
                raise MatrixError(
                    f"{STRENGTH} {value!r} is neither 1, a cell for each release, nor 2, one for each pair"
                )
            strength = max(strength, int(value))
    return strength
