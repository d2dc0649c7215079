"""The catalogue as it was read and checked, as JSON: reading that takes a twentieth of reading its files.

A wheel has it as ``index.json``, which its build writes. For a checkout it is kept in the user's cache, never in the
checkout, and made anew whenever a file on which it depends has changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_trlcompat import _cache
from pytest_trlcompat.catalog import existence, ranges
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction, ShownDifference, Symptom
from pytest_trlcompat.catalog.verdict import Verdict

__all__ = ["FILE", "cached", "keep", "packaged", "parse", "stamp", "text_of"]

FILE = Path(__file__).with_name("index.json")
"""Of a wheel; no checkout has it."""

_PACKAGE = Path(__file__).parents[1]
_VERDICTS = {verdict.value: verdict for verdict in Verdict}
"""Calling the class looks a value up ten times as slowly, and there are thousands."""
_FIELDS = ("id", "title", "wrong", "suite", "cure", "workaround", "severity")
_LISTS = ("upstream", "strategies", "needs", "without_trainer", "cure_with", "trainers")


def text_of(issues: Iterable[KnownIssue], made_from: str = "") -> str:
    """The index of a catalogue that was read and checked.

    Args:
        made_from: the :func:`stamp` of what was read; empty in a wheel, where nothing changes.
    """
    numbers: dict[str, int] = {}
    entries = [_entry(issue, numbers) for issue in issues]
    predictions = [json.loads(text) for text in numbers]
    conditions = [*(when for _, _, when, *_ in predictions), *(absence.when for absence in existence.STRATEGIES)]
    texts = {text for when in conditions for text in when.values()}
    stored = {text: ranges.parse(text).stored() for text in sorted(texts)}
    document = {"made_from": made_from, "ranges": stored, "predictions": predictions, "issues": entries}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


def _entry(issue: KnownIssue, numbers: dict[str, int]) -> dict[str, Any]:
    """
    Args:
        numbers: of predictions, which many issues have in common; those of this issue are added.
    """
    written = [
        json.dumps(
            [
                prediction.verdict.value,
                prediction.subject,
                prediction.when,
                prediction.strategies,
                prediction.why,
                prediction.by,
            ]
        )
        for prediction in issue.predictions
    ]
    return {
        **{name: getattr(issue, name) for name in (*_FIELDS, *_LISTS)},
        "symptoms": [[symptom.type_name, symptom.text, symptom.place] for symptom in issue.symptoms],
        **({} if issue.when is None else {"when": issue.when}),
        "differences": [[difference.name, difference.setting, difference.place] for difference in issue.differences],
        "predictions": [numbers.setdefault(text, len(numbers)) for text in written],
    }


def parse(text: str, made_from: str = "") -> list[KnownIssue] | None:
    """The issues of an index; ``None`` where it is another one's, or none."""
    try:
        document = json.loads(text)
        if document["made_from"] != made_from:
            return None
        # First, so that nothing below reads a specifier again.
        ranges.remember(document["ranges"])
        predictions = [
            Prediction(_VERDICTS[verdict], subject, when, tuple(strategies), why, by)
            for verdict, subject, when, strategies, why, by in document["predictions"]
        ]
        return [
            KnownIssue(
                **_plain(entry),
                symptoms=tuple(Symptom(*fields) for fields in entry["symptoms"]),
                differences=tuple(ShownDifference(*fields) for fields in entry["differences"]),
                predictions=tuple(predictions[number] for number in entry["predictions"]),
                when=entry.get("when"),
            )
            for entry in document["issues"]
        ]
    # What is damaged is made anew.
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: entry[name] for name in _FIELDS}, **{name: tuple(entry[name]) for name in _LISTS}}


def packaged() -> list[KnownIssue] | None:
    """The issues of a wheel's index; ``None`` in a checkout."""
    return parse(FILE.read_text(encoding="utf-8")) if FILE.is_file() else None


def stamp(folder: Path) -> str:
    """Changes when something may have changed on which the index of a catalogue depends; costs no reading."""
    # The index has the folders of cures, which entries leave out: it depends on where cures are, not on their texts.
    return _cache.stamp(list(_sources(folder)), _cache.files(_PACKAGE / "trainers", ".py"))


def _sources(folder: Path) -> Iterator[str]:
    yield from _cache.files(folder, ".toml")
    yield from _cache.files(_PACKAGE / "catalog", ".py")
    yield from _cache.files(_PACKAGE / "strategies", ".py")
    yield from _cache.files(_PACKAGE / "training", ".py")
    yield from _cache.files(_PACKAGE / "conformance", "rows.toml")
    for name in ("stack.py", "_issue_ids.py", "conformance/rows.py"):
        yield str(_PACKAGE / name)


def cached(folder: Path, made_from: str) -> list[KnownIssue] | None:
    """The issues of the index that :func:`keep` wrote; ``None`` where there is none, or somebody else could have."""
    text = _cache.read(folder)
    return None if text is None else parse(text, made_from)


def keep(folder: Path, issues: Iterable[KnownIssue], made_from: str) -> None:
    """Write the index of a checkout's catalogue into the user's cache."""
    _cache.write(folder, text_of(issues, made_from))
