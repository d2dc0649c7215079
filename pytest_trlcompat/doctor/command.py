"""``trlcompat doctor``: its arguments, its output and its exit status. Imports no package of the stack."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.evidence import EvidenceError
from pytest_trlcompat.catalog.known_issues import STRATEGIES, TRAINERS, Catalog, CatalogError
from pytest_trlcompat.doctor.asked import read_given
from pytest_trlcompat.doctor.bites import StrategyError
from pytest_trlcompat.doctor.diagnosis import diagnose
from pytest_trlcompat.doctor.given import GivenError
from pytest_trlcompat.doctor.text import show

__all__ = ["BITES", "CLEAR", "UNUSABLE", "main"]

CLEAR, BITES, UNUSABLE = 0, 1, 2
"""Exit statuses: nothing bites; something does, or may; the question could not be understood."""

_EPILOG = """\
examples:
  trlcompat doctor                                        what is installed here
  trlcompat doctor trl==0.15.2 transformers==4.48.3       pins; what is not named makes conditional answers
  trlcompat doctor -r requirements.txt --strategy zero3   a requirements file, one strategy
  trlcompat doctor uv.lock                                a lock, or pylock.toml
  ssh gpu pip freeze | trlcompat doctor -                 another machine
  trlcompat doctor uv.lock trl==1.0.0                     the lock, but with another trl

exit status: 0 when no known issue bites, 1 when one does or may, 2 for a question that makes no sense
"""


def main(arguments: Sequence[str]) -> int:
    """Diagnose, print, and return the exit status."""
    parsed = _parser().parse_intermixed_args(arguments)
    try:
        given = read_given(parsed.what, parsed.requirements, _standard_input)
        diagnosis = diagnose(given, _of_trainer(parsed.trainer), evidence.published(), parsed.strategy)
    except (GivenError, StrategyError, CatalogError, EvidenceError) as error:
        print(f"trlcompat doctor: {error}", file=sys.stderr)
        return UNUSABLE
    if parsed.json:
        print(json.dumps(diagnosis.to_dict(), indent=1))
    else:
        show(diagnosis, sys.stdout)
    return BITES if diagnosis.findings else CLEAR


def _standard_input() -> bytes:
    return sys.stdin.buffer.read() if sys.stdin is not None else b""  # None: it was closed before the start


def _of_trainer(name: str | None) -> Catalog:
    """The issues that somebody meets who uses one trainer, or all."""
    known = known_issues.load()
    return Catalog({issue.id: issue for issue in known.values() if name is None or issue.trainer in ("", name)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trlcompat doctor",
        description="Which known issues bite a stack, how sure that is, and what to do. Nothing is run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="PIN|LOCK|-",
        help="pins like trl==0.15.2, a uv.lock or pylock.toml, or - for a pip freeze on standard input; "
        "nothing: what is installed here",
    )
    parser.add_argument(
        "-r",
        "--requirements",
        action="append",
        default=[],
        metavar="FILE",
        help="a requirements file; may be given several times",
    )
    parser.add_argument(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME",
        help=f"consider this strategy only ({', '.join(STRATEGIES)}); may be given several times",
    )
    parser.add_argument(
        "--trainer", choices=TRAINERS, help="leave out the issues of other trainers than this one, which you do not use"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser
