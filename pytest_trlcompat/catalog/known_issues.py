"""The catalogue: the known issues, read from ``catalog.toml`` and checked.

Imports no package of the stack.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.issue import (
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

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["SOURCE", "Catalog", "CatalogError", "fingerprint", "load"]

SOURCE = Path(__file__).with_name("catalog.toml")
"""Where they are written down."""


class CatalogError(ValueError):
    """The catalogue, or a question to it, makes no sense."""


class Catalog(dict[str, KnownIssue]):
    """Known issues by id."""

    def get_issue(self, issue_id: str) -> KnownIssue:
        """
        Raises:
            CatalogError: an unknown id, with the known ones.
        """
        try:
            return self[issue_id]
        except KeyError:
            raise CatalogError(f"unknown issue {issue_id!r}; known are {', '.join(sorted(self))}") from None


def fingerprint(path: Path = SOURCE) -> tuple[int, int]:
    """Changes when the catalogue does; costs no reading."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@lru_cache
def load(path: Path = SOURCE) -> Catalog:
    """Read and check a catalogue.

    Raises:
        CatalogError: naming the file and the entry, for a missing or unknown key, verdict, subject or range.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CatalogError(f"{path}: {error}") from error
    if raw.get("schema") != 1:
        raise CatalogError(f"{path}: schema 1 was expected, {raw.get('schema')!r} was found")
    catalog = Catalog()
    for position, entry in enumerate(raw.get("issue", []), 1):
        name = entry.get("id", f"number {position}")
        try:
            issue = _issue(entry, raw.get("absent", {}))
        except (KeyError, TypeError, ValueError, re.error) as error:
            reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
            raise CatalogError(f"{path}: issue {name}: {reason}") from error
        if issue.id in catalog:
            raise CatalogError(f"{path}: issue {issue.id} stands there twice")
        catalog[issue.id] = issue
    try:
        catalog = _with_blocks(catalog)
        _check_blockers(catalog)
    except ValueError as error:
        raise CatalogError(f"{path}: {error}") from error
    return catalog


def _with_blocks(catalog: Catalog) -> Catalog:
    """Predict ``blocked`` of the issues that another one keeps from being seen, wherever that one is ``broken``.

    Such a prediction stands behind those of absence and before all others.
    """
    blocked: dict[str, list[Prediction]] = {}
    for blocking in catalog.values():
        for name in blocking.blocks:
            if name not in catalog or name == blocking.id:
                raise ValueError(f"issue {blocking.id}: blocks {name!r}, which is no other issue")
            blocked.setdefault(name, []).extend(
                replace(broken, verdict=Verdict.BLOCKED, by=blocking.id)
                for broken in blocking.predictions
                if broken.verdict is Verdict.BROKEN
            )
    return Catalog({name: _blocked(issue, blocked.get(name, [])) for name, issue in catalog.items()})


def _blocked(issue: KnownIssue, blocked: list[Prediction]) -> KnownIssue:
    first = [each for each in issue.predictions if each.verdict is Verdict.ABSENT]
    rest = [each for each in issue.predictions if each.verdict is not Verdict.ABSENT]
    return replace(issue, predictions=(*first, *blocked, *rest)) if blocked else issue


def _check_blockers(catalog: Catalog) -> None:
    """Refuse a ``blocked`` prediction by an issue that cannot be what ended the suite, or what differs first."""
    for issue in catalog.values():
        for name in {prediction.by for prediction in issue.predictions if prediction.by}:
            if name not in catalog or name == issue.id:
                raise ValueError(f"issue {issue.id}: blocked by {name!r}, which is no other issue")
            if not catalog[name].may_stop(issue):
                raise ValueError(f"issue {issue.id}: blocked by {name!r}, which is of another trainer")
            if not catalog[name].symptoms and not (catalog[name].differences and issue.suite == catalog[name].suite):
                raise ValueError(f"issue {issue.id}: blocked by {name!r}, which has no [[issue.symptom]] to know it by")


def _absences(entry: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The predictions for releases that have no such trainer, which come before all others."""
    if entry is None:
        return []
    _known_keys(entry, {"when", "why"})
    return [{"verdict": "absent", "subject": subject, **entry} for subject in SUBJECTS]


_ISSUE_KEYS = {
    *("id", "title", "wrong", "upstream", "suite", "cure", "symptom", "prediction"),
    *(
        "strategies",
        "settings",
        "needs",
        "blocks",
        "without_trainer",
        "cure_with",
        "workaround",
        "difference",
        "trainers",
    ),
}


def _issue(entry: Mapping[str, Any], absent: Mapping[str, Any]) -> KnownIssue:
    _known_keys(entry, _ISSUE_KEYS)
    absences = _absences(absent.get(measured_with(entry["id"])))
    issue = KnownIssue(
        id=_line(entry, "id"),
        title=_line(entry, "title"),
        wrong=_line(entry, "wrong"),
        upstream=_lines(entry, "upstream"),
        suite=_line(entry, "suite"),
        cure=_line(entry, "cure", may_be_empty=True),
        symptoms=tuple(_symptom(raw) for raw in entry.get("symptom", [])),
        predictions=tuple(_prediction(raw) for raw in [*absences, *entry["prediction"]]),
        strategies=(*_lines(entry, "strategies", default=()), *_labels_of_settings(entry.get("settings", {}))),
        needs=_lines(entry, "needs", default=()),
        blocks=_lines(entry, "blocks", default=()),
        without_trainer=_lines(entry, "without_trainer", default=()),
        cure_with=_lines(entry, "cure_with", default=()),
        workaround=_line(entry, "workaround") if "workaround" in entry else "",
        trainers=_trainers(entry),
        differences=tuple(_difference(raw) for raw in entry.get("difference", [])),
    )
    for strategy in issue.strategies:
        if kind(strategy) not in STRATEGIES or WILDCARD.search(strategy):
            raise ValueError(f"unknown strategy {strategy!r}; known are {', '.join(STRATEGIES)}, each with -VARIANT")
    if unlisted := sorted(set(issue.without_trainer) - set(issue.strategies)):
        raise ValueError(f"without_trainer names {', '.join(unlisted)}, which strategies does not list")
    stack.check_ranges(dict.fromkeys(issue.needs, ""))
    for prediction in issue.predictions:
        _check_patterns(prediction.strategies, issue.strategies)
    return issue


def _labels_of_settings(raw: Mapping[str, Any]) -> list[str]:
    """The labels of all settings that conformance suites try, or of those that are named."""
    if not raw:
        return []
    _known_keys(raw, {"trainer", "labels"})
    from pytest_trlcompat.conformance import rows  # pytest loads this module at every start

    known = rows.labels(raw["trainer"])
    labels: list[str] = raw.get("labels", list(known))
    if unknown := sorted(set(labels) - set(known)):
        raise ValueError(
            f"settings names {', '.join(unknown)}, which conformance/{raw['trainer']}/rows.toml does not have"
        )
    return labels


def _difference(raw: Mapping[str, Any]) -> ShownDifference:
    _known_keys(raw, {"quantity", "setting", "where"})
    where = re.compile(_line(raw, "where")) if "where" in raw else re.compile("")
    return ShownDifference(re.compile(_line(raw, "quantity")), dict(raw.get("setting", {})), where)


def _symptom(raw: Mapping[str, Any]) -> Symptom:
    _known_keys(raw, {"type", "text", "where"})
    where = re.compile(_line(raw, "where")) if "where" in raw else None
    return Symptom(_line(raw, "type"), re.compile(raw["text"]), where)


def _prediction(raw: Mapping[str, Any]) -> Prediction:
    _known_keys(raw, {"verdict", "subject", "when", "strategies", "why", "by"})
    when = dict(raw["when"])
    stack.check_ranges(when)
    if raw["subject"] not in SUBJECTS:
        raise ValueError(f"unknown subject {raw['subject']!r}; known are {', '.join(SUBJECTS)}")
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
    for package, wanted in prediction.ranges.items():
        if not wanted:
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


def _known_keys(raw: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ValueError(f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}")
