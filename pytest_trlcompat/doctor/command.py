"""``trlcompat doctor``: its arguments, its output and its exit status. Imports no package of the stack."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.evidence import EvidenceError
from pytest_trlcompat.catalog.issue import STRATEGIES
from pytest_trlcompat.catalog.known_issues import CatalogError
from pytest_trlcompat.doctor.applicable import StrategyError
from pytest_trlcompat.doctor.diagnosis import diagnose
from pytest_trlcompat.doctor.request import read_stack_spec
from pytest_trlcompat.doctor.stack_spec import StackSpecError
from pytest_trlcompat.doctor.text import show
from pytest_trlcompat.trainers.kinds import TRAINERS

__all__ = ["AFFECTED", "CLEAR", "UNUSABLE", "main"]

CLEAR, AFFECTED, UNUSABLE = 0, 1, 2
"""Exit statuses: no known issue affects the stack; one does, or may, or cannot be judged; the request is not valid."""

_EPILOG = """\
examples:
  trlcompat doctor                                        the packages installed here
  trlcompat doctor trl==0.15.2 transformers==4.48.3       pins; answers are conditional on packages not named
  trlcompat doctor -r requirements.txt --strategy zero3   a requirements file, one strategy
  trlcompat doctor uv.lock                                a lock, or pylock.toml
  ssh gpu pip freeze | trlcompat doctor -                 another machine
  trlcompat doctor uv.lock trl==1.0.0                     the lock, with another trl

exit status: 0 if no known issue affects the stack, 1 if one does, may, or cannot be judged, 2 for an invalid request
"""


def main(arguments: Sequence[str]) -> int:
    """Diagnose, print, and return the exit status."""
    parsed = _parser().parse_intermixed_args(arguments)
    try:
        spec = read_stack_spec(parsed.what, parsed.requirements, _standard_input)
        diagnosis = diagnose(spec, known_issues.load(), evidence.published(), parsed.strategy, parsed.trainer or "")
    except (StackSpecError, StrategyError, CatalogError, EvidenceError) as error:
        print(f"trlcompat doctor: {error}", file=sys.stderr)
        return UNUSABLE
    if parsed.json:
        print(json.dumps(diagnosis.to_dict(), indent=1))
    else:
        show(diagnosis, sys.stdout)
    return AFFECTED if diagnosis.issues else CLEAR


def _standard_input() -> bytes:
    return sys.stdin.buffer.read() if sys.stdin is not None else b""  # None: it was closed before the start


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trlcompat doctor",
        description="Says which known issues affect a stack, with what confidence, and what to do. Runs nothing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="PIN|LOCK|-",
        help="pins like trl==0.15.2, a uv.lock or pylock.toml, or - for a pip freeze on standard input; "
        "without any, the packages installed here",
    )
    parser.add_argument(
        "-r",
        "--requirements",
        action="append",
        default=[],
        metavar="FILE",
        help="a requirements file; may be repeated",
    )
    parser.add_argument(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME",
        help=f"consider only this strategy ({', '.join(STRATEGIES)}); may be repeated",
    )
    parser.add_argument(
        "--trainer",
        choices=TRAINERS,
        metavar="NAME",
        help=f"leave out issues of other trainers ({', '.join(TRAINERS)}); trainer is any other transformers.Trainer",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser
