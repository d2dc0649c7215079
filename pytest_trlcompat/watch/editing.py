"""The catalogue's files with predictions as they were measured, each before the one that was wrong.

Lines are inserted and none is changed, so that comments and order stay as a person has written them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_trlcompat.catalog import known_issues, reading
from pytest_trlcompat.catalog.issue import Prediction
from pytest_trlcompat.catalog.known_issues import Catalog, CatalogError
from pytest_trlcompat.catalog.ranges import parse
from pytest_trlcompat.catalog.reading import PREDICTION
from pytest_trlcompat.catalog.verdict import Verdict

__all__ = ["Correction", "NotCorrected", "correct"]


class NotCorrected(ValueError):
    """A person must write this prediction; the text says why."""


@dataclass(frozen=True)
class Correction:
    """A verdict that was measured, and from which release on.

    Attributes:
        by: of ``blocked``, the issue that stops the suite first.
        first: the release of ``package`` that brought it.
        versions: of the stack that was measured.
        why: of the prediction.
    """

    issue: str
    subject: str
    strategies: tuple[str, ...]
    verdict: Verdict
    by: str
    package: str
    first: str
    versions: Mapping[str, str]
    why: str


def correct(folder: Path, edited: Mapping[Path, str], correction: Correction) -> dict[Path, str]:
    """The texts of a catalogue's files so that it predicts, for what was measured, what was measured.

    The new prediction holds where the wrong one did, from the first release on; the others stay.

    Args:
        folder: of the catalogue.
        edited: texts of its files that differ from what is on disk; returned with that of the issue's file.

    Raises:
        NotCorrected: where that cannot be written so.
    """
    if correction.verdict in (Verdict.ERROR, Verdict.HANG):
        raise NotCorrected(f"nobody has explained the {correction.verdict}: it needs a known issue of its own first")
    if correction.verdict is Verdict.UNTESTABLE:
        raise NotCorrected("what cannot be tested is no verdict about a release")
    entries = reading.written(folder, edited).entries
    if correction.issue not in entries:
        raise NotCorrected(f"the catalogue has no issue {correction.issue}")
    file = known_issues.file_of(correction.issue, folder)
    text = edited[file] if file in edited else file.read_text(encoding="utf-8")
    decided = _decided(reading.read(folder, edited), correction)
    position = _position(decided, entries, correction) if decided is not None else None
    lines = text.splitlines(keepends=True)
    place = _place(lines, correction.issue, position)
    when = _when(decided.when if decided is not None else {}, correction)
    # Before the wrong prediction: the first one that holds decides.
    changed = {**edited, file: "".join([*lines[:place], _line(correction, when), *lines[place:]])}
    _check(folder, changed, correction)
    return changed


def _decided(catalog: Catalog, correction: Correction) -> Prediction | None:
    """The prediction that was wrong; ``None`` where there was none."""
    predictions = catalog.get_issue(correction.issue).predictions
    strategy = correction.strategies[0]
    return next((p for p in predictions if p.applies(correction.subject, strategy, correction.versions)), None)


def _position(decided: Prediction, entries: Mapping[str, Mapping[str, Any]], correction: Correction) -> int:
    """Which of the entry's written predictions it is, from 0."""
    for position, raw in enumerate(entries[correction.issue]["prediction"]):
        for prediction in reading.expanded(raw, entries):
            same = (
                prediction["verdict"],
                prediction["subject"],
                prediction["when"],
                tuple(prediction.get("strategies", ())),
                prediction["why"],
            )
            if same == (decided.verdict, decided.subject, decided.when, decided.strategies, decided.why):
                return position
    raise NotCorrected(f"{decided.describe()} follows from another entry, which has to be changed instead")


def _when(wrong: Mapping[str, str], correction: Correction) -> dict[str, str]:
    bound = f">={correction.first}"
    both = ",".join(part for part in (bound, wrong.get(correction.package, "")) if part)
    narrowed = parse(both)
    # Several intervals are described with "or", which no specifier set has.
    return {**wrong, correction.package: narrowed.describe() if len(narrowed.intervals) == 1 else both}


def _place(lines: Sequence[str], issue: str, position: int | None) -> int:
    """The line before which the new prediction stands: the wrong one's, or the end of the list."""
    start = next((number for number, line in enumerate(lines) if line.startswith("prediction = [")), len(lines))
    end = next((number for number in range(start, len(lines)) if lines[number].startswith("]")), len(lines))
    predictions = [number for number in range(start + 1, end) if PREDICTION.match(lines[number])]
    if end == len(lines) or (position is not None and position >= len(predictions)):
        raise NotCorrected(
            f"the file of {issue} does not have its predictions one a line, between 'prediction = [' and ']'"
        )
    return end if position is None else predictions[position]


def _line(correction: Correction, when: Mapping[str, str]) -> str:
    # JSON's strings and lists are TOML's as well.
    ranges = ", ".join(f"{package} = {json.dumps(text)}" for package, text in when.items())
    parts = [
        f"verdict = {json.dumps(correction.verdict.value)}",
        *([f"by = {json.dumps(correction.by)}"] if correction.by else []),
        f"subject = {json.dumps(correction.subject)}",
        f"when = {{ {ranges} }}",
        f"strategies = {json.dumps(list(correction.strategies))}",
        f"why = {json.dumps(correction.why, ensure_ascii=False)}",
    ]
    return f"    {{ {', '.join(parts)} }},\n"


def _check(folder: Path, changed: Mapping[Path, str], correction: Correction) -> None:
    try:
        issue = reading.read(folder, changed).get_issue(correction.issue)
    except CatalogError as error:
        raise NotCorrected(f"the catalogue would refuse it: {error}") from error
    for strategy in correction.strategies:
        prediction = issue.predict(correction.subject, strategy, correction.versions)
        if prediction is None or prediction.verdict is not correction.verdict or prediction.by != correction.by:
            decides = prediction.describe() if prediction else "none at all"
            raise NotCorrected(f"an earlier prediction decides under {strategy}: {decides}")
