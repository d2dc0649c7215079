"""``trlcompat doctor``: its arguments, its output and its exit status."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pytest_trlcompat._escaping import encodable, visible
from pytest_trlcompat.catalog import known_issues, measurements
from pytest_trlcompat.catalog.evidence_fields import EvidenceError
from pytest_trlcompat.catalog.issue import SEVERITIES, STRATEGIES
from pytest_trlcompat.catalog.known_issues import CatalogError
from pytest_trlcompat.doctor.alternatives import PLATFORMS, Asked
from pytest_trlcompat.doctor.applicable import StrategyError
from pytest_trlcompat.doctor.request import read_stack_spec
from pytest_trlcompat.doctor.stack_spec import StackSpecError
from pytest_trlcompat.trainers.curing.kinds import TRAINERS
from pytest_trlcompat.training.errors import TrainingError

__all__ = ["AFFECTED", "CLEAR", "UNUSABLE", "main"]

CLEAR, AFFECTED, UNUSABLE = 0, 1, 2
"""Exit statuses: all that was asked about is there, and no known issue affects it; one does, or may, or something that
was asked about cannot be judged; there is no answer, also since the stack does not have what was asked about."""

_EPILOG = """\
examples:
  trlcompat doctor                                        the packages installed here
  trlcompat doctor trl==0.15.2 transformers==4.48.3       pins; answers are conditional on packages not named
  trlcompat doctor -r requirements.txt --strategy zero3   a requirements file, one strategy
  trlcompat doctor uv.lock                                a lock: uv.lock, pylock.toml, poetry.lock, Pipfile.lock
  trlcompat doctor uv.lock --python 3.12                  of its forks those for one Python
  ssh gpu pip freeze | trlcompat doctor -                 another machine
  trlcompat doctor uv.lock trl==1.0.0                     the lock, with another trl

exit status: 0 if the stack has what was asked about and no known issue affects it, 1 if one does, may, or cannot be
judged, or if nothing was measured with the trainer, 2 if there is no answer or the stack lacks what was asked about;
with --fail-on 1 only if an issue that is as bad as that affects it
"""


def main(arguments: Sequence[str]) -> int:
    """Diagnose, print, and return the exit status."""
    parsed = _parser().parse_intermixed_args(arguments)
    try:
        asked = Asked(parsed.python or "", parsed.platform or "")
        spec = read_stack_spec(parsed.what, parsed.requirements, _standard_input, asked)
        catalog = known_issues.load()
        if parsed.training:
            from pytest_trlcompat.doctor import training_command  # most questions are about a stack

            return training_command.answer(parsed, spec, catalog)
        from pytest_trlcompat.doctor.diagnosis import diagnose
        from pytest_trlcompat.doctor.text import show

        diagnosis = diagnose(spec, catalog, measurements.published(catalog), parsed.strategy, parsed.trainer or "")
        affected = diagnosis.reaches(parsed.fail_on) if parsed.fail_on else not diagnosis.is_clear
        status = AFFECTED if affected else CLEAR
        if parsed.json:
            print(json.dumps(diagnosis.to_dict(), indent=1).replace("\x7f", "\\u007f"))
        else:
            show(diagnosis, sys.stdout, everything=parsed.all)
        sys.stdout.flush()
        return status
    except (StackSpecError, StrategyError, CatalogError, EvidenceError, TrainingError) as error:
        return _refused(str(error))
    except BrokenPipeError:
        # The reader closed the pipe; Python must not print an error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status
    except Exception as error:
        # Its text may repeat what was read, and 1, the status of Python's own end, would say that an issue affects the
        # stack.
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        return _refused(
            f"a fault of the doctor: {type(error).__name__} in {Path(place.filename).name}, line {place.lineno}; "
            "please report it with the smallest input that shows it. Nothing is known about this stack"
        )


def _refused(text: str) -> int:
    print(encodable(visible(f"trlcompat doctor: {text}"), sys.stderr.encoding), file=sys.stderr)
    return UNUSABLE


def _standard_input(most: int) -> bytes:
    return sys.stdin.buffer.read(most) if sys.stdin is not None else b""  # None: it was closed before the start


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(visible(message))


def _python(text: str) -> str:
    if not re.fullmatch(r"3\.\d{1,3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a minor release such as 3.12")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
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
        help="pins like trl==0.15.2, a uv.lock, pylock.toml, poetry.lock or Pipfile.lock, or - for a pip freeze on "
        "standard input; without any, the packages installed here",
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
        "--training",
        action="append",
        default=[],
        metavar="FILE|COMMAND",
        help="say what bites this training: its file of settings (TRL's, axolotl's, LLaMA-Factory's), Accelerate's or "
        "DeepSpeed's file, a checkpoint, or the command that starts it, in quotes; may be repeated",
    )
    parser.add_argument(
        "--fail-on",
        choices=SEVERITIES,
        metavar="SEVERITY",
        help=f"exit status 1 only where an issue affects the stack, or bites the training, that is as bad as this "
        f"({', '.join(SEVERITIES)})",
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
    parser.add_argument(
        "--python",
        type=_python,
        metavar="X.Y",
        help="of a lock or a list consider what it holds for this Python; without it, for every one",
    )
    parser.add_argument(
        "--platform",
        choices=PLATFORMS,
        help="consider what it holds for this platform; without it, for every one",
    )
    parser.add_argument(
        "--all", action="store_true", help="show every issue in full, also where that is more than a screen"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser
