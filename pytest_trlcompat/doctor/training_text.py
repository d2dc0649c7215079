"""What bites a training, as text. Imports no package of the stack."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import IO

from pytest_trlcompat._escaping import encodable, visible
from pytest_trlcompat.doctor.training_diagnosis import BitingIssue, TrainingDiagnosis
from pytest_trlcompat.training.axes import TRAINERS

__all__ = ["show"]

_WIDTH = 120
_LABEL = 9


def show(diagnosis: TrainingDiagnosis, file: IO[str]) -> None:
    """Print a diagnosis to ``file``."""
    text = "".join(f"{line}\n" for line in _lines(diagnosis))
    file.write(encodable(text, getattr(file, "encoding", None)))


def _lines(diagnosis: TrainingDiagnosis) -> Iterator[str]:
    training = diagnosis.training
    stack = ", ".join(f"{package} {text}" for package, text in diagnosis.spec.texts.items())
    strategy = training.values.get("parallel.strategy")
    under = f" under {strategy}" if strategy else ", under a strategy that is not said"
    yield from _wrapped(f"{TRAINERS[training.trainer]}{under} ({training.source or 'the training'})")
    yield from _wrapped(f"on {stack} ({diagnosis.spec.source})")
    for note in diagnosis.notes:
        yield from _wrapped(f"note: {note}")
    yield ""
    yield _heading(diagnosis)
    for issue in diagnosis.bite:
        yield ""
        yield from _four_lines(issue)
    if diagnosis.may:
        yield ""
        yield from _wrapped("These may bite; what this training says does not tell. Look at:")
        for issue in diagnosis.may:
            yield from _wrapped(f"  {issue.issue.severity:8} {issue.issue.id}: {_look(issue)}", "    ")
    yield ""
    yield f"{len(diagnosis.clear)} other known issues of this trainer do not bite this training on this stack."


def _heading(diagnosis: TrainingDiagnosis) -> str:
    number, open_ones = len(diagnosis.bite), len(diagnosis.may)
    bite = {0: "No known issue bites", 1: "1 known issue bites"}.get(number, f"{number} known issues bite")
    return f"{bite} this training, {open_ones or 'none'} may."


def _look(issue: BitingIssue) -> str:
    """The first two things to look at: in the training before in how it was measured. ``--json`` has all."""
    texts = sorted(issue.answer.look, key=lambda text: "measured" in text)
    return "; or ".join(texts[:2])


def _four_lines(issue: BitingIssue) -> Iterator[str]:
    yield from _entry(issue.issue.severity, f"{issue.issue.id}: {issue.issue.wrong}")
    yield from _entry("since", issue.since)
    yield from _entry("do", issue.remedy)
    yield from _entry("shown", issue.numbers)


def _entry(label: str, text: str) -> Iterator[str]:
    yield from _wrapped(f"{label.ljust(_LABEL)}{text}", " " * _LABEL)


def _wrapped(text: str, margin: str = "  ") -> list[str]:
    return textwrap.wrap(
        visible(text), _WIDTH, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
