"""Reading the files of the known issues, and checking everything in them.

To ask about known issues, take them from :mod:`known_issues <pytest_trlcompat.catalog.known_issues>`: it keeps what was
read and checked before.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.entries import Catalog, CatalogError, file_of
from pytest_trlcompat.catalog.issue import (
    SEVERITIES,
    STRATEGIES,
    SUBJECTS,
    TRAINERS,
    WILDCARD,
    KnownIssue,
    Prediction,
    ShownDifference,
    Symptom,
    kind,
    measured_with,
)
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.conformance import rows
from pytest_trlcompat.training.conditions import Condition, check

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["PREDICTION", "expanded", "read", "written"]

BOTH = "both"
"""A subject as it is written: TRL's own trainer and the corrected one."""

_ABSENT = "absent.toml"
"""The file of that folder that says which releases lack a trainer, for all of its issues."""
_PACKAGE = Path(__file__).parents[1]
PREDICTION = re.compile(r"\s*\{.*\bverdict *=")
"""A line of an issue's file that holds a prediction."""


class _PredictionError(ValueError):
    """What is wrong with one prediction of an entry.

    Attributes:
        number: which one, from 0.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


@dataclass(frozen=True)
class Written:
    """The entries of a catalogue as they are written, before anything is checked.

    Attributes:
        absent: by trainer, the releases that lack it.
        entries: by id.
        files: by id, where the entry stands.
    """

    absent: Mapping[str, Any]
    entries: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, Path]


def read(path: Path, edited: Mapping[Path, str] | None = None) -> Catalog:
    """Read and check a catalogue: a folder with a file for each issue, or one file of ``[[issue]]`` tables.

    Args:
        edited: texts that files have in place of what is on disk.

    Raises:
        CatalogError: naming the file and the entry, for a missing or unknown key, verdict, subject or range.
    """
    edited = edited or {}
    source = written(path, edited)
    catalog = Catalog()
    for name, entry in source.entries.items():
        file = source.files[name]
        try:
            catalog[name] = _issue(entry, source)
        except (KeyError, TypeError, ValueError, re.error) as error:
            reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
            raise CatalogError(f"{_place(file, path, error, edited)}: issue {name}: {reason}") from error
    for issue in catalog.values():
        try:
            _check_blockers(issue, catalog)
        except ValueError as error:
            raise CatalogError(f"{source.files[issue.id]}: {error}") from error
    return catalog


def _place(file: Path, path: Path, error: Exception, edited: Mapping[Path, str]) -> str:
    """The file, with the line of the prediction that is wrong where a line is a prediction."""
    # One file of many issues has no line for each prediction.
    if not isinstance(error, _PredictionError) or file == path:
        return str(file)
    lines = _text(file, edited).splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if PREDICTION.match(line)]
    return f"{file}:{numbers[error.number]}" if error.number < len(numbers) else str(file)


def written(path: Path, edited: Mapping[Path, str]) -> Written:
    """The entries of a catalogue; only the places of their files are checked.

    Raises:
        CatalogError: a file that is no TOML, or that lies where no issue of its name does; or there is none.
    """
    if not path.is_dir():
        return _written_in_one(path, _parsed(path, edited))
    head = _parsed(path / _ABSENT, edited)
    _check_schema(path / _ABSENT, head)
    entries, files = {}, {}
    for file in sorted(path.glob("*/*.toml")):
        name = file.stem
        if file != file_of(name, path):
            raise CatalogError(f"{file}: the file of an issue with this id is {file_of(name, path)}")
        entry = _parsed(file, edited)
        if "id" in entry:
            raise CatalogError(f"{file}: issue {name}: unknown key id: the file's name is the id")
        entries[name], files[name] = {"id": name, **entry}, file
    if not entries:
        raise CatalogError(f"{path}: there is no file of an issue in its folders")
    return Written(head.get("absent", {}), entries, files)


def _written_in_one(path: Path, raw: Mapping[str, Any]) -> Written:
    _check_schema(path, raw)
    entries: dict[str, Mapping[str, Any]] = {}
    for position, entry in enumerate(raw.get("issue", []), 1):
        name = entry.get("id", f"number {position}")
        if name in entries:
            raise CatalogError(f"{path}: issue {name} stands there twice")
        entries[name] = entry
    return Written(raw.get("absent", {}), entries, dict.fromkeys(entries, path))


def _check_schema(path: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("schema") != 1:
        raise CatalogError(f"{path}: schema 1 was expected, {raw.get('schema')!r} was found")


def _parsed(path: Path, edited: Mapping[Path, str]) -> Mapping[str, Any]:
    try:
        return _loaded(_text(path, edited))
    except tomllib.TOMLDecodeError as error:
        raise CatalogError(f"{path}: {error}") from error


@functools.cache
def _loaded(text: str) -> Mapping[str, Any]:
    """A file's tables, which nobody changes. A correction reads the catalogue three times, and one file has changed."""
    return tomllib.loads(text)


def _text(path: Path, edited: Mapping[Path, str]) -> str:
    return edited[path] if path in edited else path.read_text(encoding="utf-8")


def expanded(raw: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The predictions that a written one stands for: one for each subject.

    A ``blocked`` one without ``when`` holds wherever the issue that it names is ``broken``: it takes what it leaves out
    from that issue's predictions of ``broken``.

    Args:
        entries: of the catalogue, by id.

    Raises:
        ValueError: the issue that it names is broken nowhere.
    """
    subjects = _subjects(raw)
    if raw.get("verdict") != Verdict.BLOCKED or "when" in raw or "by" not in raw:
        yield from ({**raw, "subject": subject} for subject in subjects)
        return
    if raw["by"] not in entries:
        raise ValueError(f"blocked by {raw['by']!r}, which is no other issue")
    broken = [
        prediction for prediction in entries[raw["by"]]["prediction"] if prediction.get("verdict") == Verdict.BROKEN
    ]
    predictions = [
        {**prediction, **raw, "subject": subject}
        for prediction in broken
        for subject in _subjects(prediction)
        if subject in subjects
    ]
    if not predictions:
        raise ValueError(f"blocked by {raw['by']!r}, which is nowhere broken for {', '.join(subjects)}")
    yield from predictions


def _subjects(raw: Mapping[str, Any]) -> tuple[str, ...]:
    by_default = {"subject": BOTH} if raw.get("verdict") == Verdict.BLOCKED and "when" not in raw else {}
    subject = {**by_default, **raw}["subject"]
    if subject not in (*SUBJECTS, BOTH):
        raise ValueError(f"unknown subject {subject!r}; known are {', '.join((*SUBJECTS, BOTH))}")
    return SUBJECTS if subject == BOTH else (subject,)


def _check_blockers(issue: KnownIssue, catalog: Catalog) -> None:
    """Refuse a ``blocked`` prediction by an issue that cannot be what ended the suite, or what differs first."""
    for name in {prediction.by for prediction in issue.predictions if prediction.by}:
        if name not in catalog or name == issue.id:
            raise ValueError(f"issue {issue.id}: blocked by {name!r}, which is no other issue")
        if not catalog[name].may_stop(issue):
            raise ValueError(f"issue {issue.id}: blocked by {name!r}, which is of another trainer")
        if not catalog[name].symptoms and not (catalog[name].differences and issue.suite == catalog[name].suite):
            raise ValueError(f"issue {issue.id}: blocked by {name!r}, which has no symptom to know it by")


def _absences(entry: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The predictions for releases that have no such trainer, which come before all others."""
    if entry is None:
        return []
    _known_keys(entry, {"when", "why"})
    return [{"verdict": "absent", "subject": BOTH, **entry}]


_ISSUE_KEYS = {
    *("id", "title", "wrong", "severity", "upstream", "suite", "cure", "symptom", "prediction"),
    *(
        "strategies",
        "settings",
        "needs",
        "without_trainer",
        "cure_with",
        "workaround",
        "difference",
        "trainers",
        "when",
    ),
}


def _issue(entry: Mapping[str, Any], written: Written) -> KnownIssue:
    _known_keys(entry, _ISSUE_KEYS)
    absences = _absences(written.absent.get(measured_with(entry["id"])))
    issue = KnownIssue(
        id=_line(entry, "id"),
        title=_line(entry, "title"),
        wrong=_line(entry, "wrong"),
        severity=_severity(entry),
        upstream=_lines(entry, "upstream"),
        suite=_line(entry, "suite"),
        cure=_cure(_line(entry, "cure", may_be_empty=True)),
        symptoms=tuple(_symptom(raw) for raw in entry.get("symptom", [])),
        predictions=tuple(_predictions([*absences, *entry["prediction"]], len(absences), written.entries)),
        strategies=(*_lines(entry, "strategies", default=()), *_labels_of_settings(entry.get("settings", {}))),
        needs=_lines(entry, "needs", default=()),
        without_trainer=_lines(entry, "without_trainer", default=()),
        cure_with=tuple(map(_cure, _lines(entry, "cure_with", default=()))),
        workaround=_line(entry, "workaround") if "workaround" in entry else "",
        trainers=_trainers(entry),
        when=_when(entry),
        differences=tuple(_difference(raw) for raw in entry.get("difference", [])),
    )
    for strategy in issue.strategies:
        if kind(strategy) not in STRATEGIES or WILDCARD.search(strategy):
            raise ValueError(f"unknown strategy {strategy!r}; known are {', '.join(STRATEGIES)}, each with -VARIANT")
    if unlisted := sorted(set(issue.without_trainer) - set(issue.strategies)):
        raise ValueError(f"without_trainer names {', '.join(unlisted)}, which strategies does not list")
    stack.check_ranges(dict.fromkeys(issue.needs, ""))
    for number, raw in enumerate(entry["prediction"]):
        try:
            _check_patterns(_lines(raw, "strategies", default=()), issue.strategies)
        except ValueError as error:
            raise _PredictionError(number, str(error)) from error
    return issue


def _cure(name: str) -> str:
    """The full name of the module that an entry calls by its last part: ``fsdp_save``; empty for an empty name."""
    if not name:
        return ""
    if name not in _cures():
        raise ValueError(f"no module of pytest_trlcompat.trainers is called {name}: give its name without its folder")
    return _cures()[name]


@functools.cache
def _cures() -> Mapping[str, str]:
    """By the last part of their names, which no other has, the modules of ``trainers``: found without importing it."""
    modules = (path.relative_to(_PACKAGE.parent) for path in _PACKAGE.joinpath("trainers").glob("[a-z]*/[a-z]*.py"))
    return {path.stem: ".".join(path.with_suffix("").parts) for path in modules if path.parent.name != "curing"}


def _predictions(
    written: Sequence[Mapping[str, Any]], first: int, entries: Mapping[str, Mapping[str, Any]]
) -> Iterator[Prediction]:
    """
    Args:
        first: how many do not stand in the entry itself, and come before those that do.
    """
    for number, raw in enumerate(written):
        try:
            yield from (_prediction(prediction) for prediction in expanded(raw, entries))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
            raise _PredictionError(number - first, reason) from error


def _severity(entry: Mapping[str, Any]) -> str:
    severity: str = entry["severity"]
    if severity not in SEVERITIES:
        raise ValueError(f"unknown severity {severity!r}; known are {', '.join(SEVERITIES)}")
    return severity


def _labels_of_settings(raw: Mapping[str, Any]) -> list[str]:
    """The labels of all settings that conformance suites try, or of those that are named."""
    if not raw:
        return []
    _known_keys(raw, {"trainer", "labels"})
    known = rows.labels(raw["trainer"])
    labels: list[str] = raw.get("labels", list(known))
    if unknown := sorted(set(labels) - set(known)):
        raise ValueError(
            f"settings names {', '.join(unknown)}, which conformance/{raw['trainer']}/rows.toml does not have"
        )
    return labels


def _difference(raw: Mapping[str, Any]) -> ShownDifference:
    _known_keys(raw, {"quantity", "setting", "where"})
    place = _line(raw, "where") if "where" in raw else ""
    difference = ShownDifference(_line(raw, "quantity"), dict(raw.get("setting", {})), place)
    # For their errors alone: whoever asks for a pattern compiles it.
    re.compile(difference.name), re.compile(difference.place)
    return difference


def _symptom(raw: Mapping[str, Any]) -> Symptom:
    _known_keys(raw, {"type", "text", "where"})
    symptom = Symptom(_line(raw, "type"), raw["text"], _line(raw, "where") if "where" in raw else "")
    # For their errors alone, as above.
    re.compile(symptom.text), re.compile(symptom.place)
    return symptom


def _prediction(raw: Mapping[str, Any]) -> Prediction:
    _known_keys(raw, {"verdict", "subject", "when", "strategies", "why", "by"})
    when = dict(raw["when"])
    stack.check_ranges(when)
    prediction = Prediction(
        verdict=Verdict(raw["verdict"]),
        subject=raw["subject"],
        when=when,
        strategies=_lines(raw, "strategies", default=()),
        why=_line(raw, "why"),
        by=_line(raw, "by") if "by" in raw else "",
    )
    if prediction.verdict is Verdict.BLOCKED and not prediction.by:
        raise ValueError('a blocked prediction must name the issue that stops the suite first, by = "ISSUE ID"')
    if prediction.by and prediction.verdict is not Verdict.BLOCKED:
        raise ValueError(
            f"by = {prediction.by!r} belongs to a blocked prediction, and this one is of {prediction.verdict}"
        )
    for package, versions in prediction.ranges.items():
        if not versions:
            raise ValueError(f"no version of {package} lies in the range {when[package]!r}")
    return prediction


def _check_patterns(patterns: tuple[str, ...], declared: tuple[str, ...]) -> None:
    """Refuse a pattern that can match no strategy, or none of those that the entry lists."""
    for pattern in patterns:
        if not any(fnmatchcase(name, kind(pattern)) for name in STRATEGIES):
            raise ValueError(f"strategy pattern {pattern!r} matches none of {', '.join(STRATEGIES)}")
        if declared and not any(fnmatchcase(name, pattern) for name in declared):
            raise ValueError(f"strategy pattern {pattern!r} matches none of this issue's: {', '.join(declared)}")


def _line(raw: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    text = raw[key]
    if not isinstance(text, str) or "\n" in text or not (text.strip() or may_be_empty):
        raise ValueError(f"{key} must be one line of text, not {text!r}")
    return text


def _lines(raw: Mapping[str, Any], key: str, *, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
    texts = raw[key] if default is None else raw.get(key, default)
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{key} must be a list of texts, not {texts!r}")
    if len(set(texts)) != len(texts):
        raise ValueError(f"{key} names something twice: {', '.join(texts)}")
    return tuple(texts)


def _trainers(entry: Mapping[str, Any]) -> tuple[str, ...]:
    named = tuple(entry.get("trainers", ()))
    unknown = [name for name in named if name not in TRAINERS]
    if unknown or len(set(named)) < len(named):
        raise ValueError(f"trainers {', '.join(map(str, named))}: each once, of {', '.join(TRAINERS)}")
    return named


def _when(entry: Mapping[str, Any]) -> Condition | None:
    condition: Condition | None = entry.get("when")
    if condition is not None:
        check(condition)
    return condition


def _known_keys(raw: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ValueError(f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}")
