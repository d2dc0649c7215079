"""The known issues, read from ``catalog.toml``, and what they predict for a stack.

Imports no package of the stack.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_trlcompat import stack
from pytest_trlcompat.verdict import Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["SUBJECTS", "Catalog", "CatalogError", "KnownIssue", "Prediction", "Symptom", "load"]

SUBJECTS = ("upstream", "corrected")
"""Whose trainer a suite runs: TRL's own, or ours."""

_CATALOG = Path(__file__).with_name("catalog.toml")


class CatalogError(ValueError):
    """The catalogue, or a question to it, makes no sense."""


@dataclass(frozen=True)
class Symptom:
    """How the issue shows when it raises: the exception's class name and a pattern that its text matches.

    The name is compared with those of the exception's class and of all its bases.
    """

    type_name: str
    pattern: re.Pattern[str]

    def matches(self, mro: tuple[str, ...], message: str) -> bool:
        return self.type_name in mro and self.pattern.search(message) is not None


@dataclass(frozen=True)
class Prediction:
    """The verdict that is expected of ``subject`` where every version range holds.

    Attributes:
        strategies: to which it applies, as shell patterns (``fsdp1*``); empty means all.
        why: one line for people, shown when the prediction is wrong.
    """

    verdict: Verdict
    subject: str
    when: dict[str, str]
    strategies: tuple[str, ...]
    why: str

    def applies(self, subject: str, strategy: str, versions: Mapping[str, str]) -> bool:
        return (
            self.subject == subject
            and (not self.strategies or any(fnmatchcase(strategy, pattern) for pattern in self.strategies))
            and stack.satisfied(self.when, versions)
        )

    def describe(self) -> str:
        ranges = ", ".join(f"{package} {text}" for package, text in self.when.items()) or "every version"
        strategies = " under " + ", ".join(self.strategies) if self.strategies else ""
        return f"{self.verdict} for {self.subject}{strategies} with {ranges} ({self.why})"


@dataclass(frozen=True)
class KnownIssue:
    """A catalogue entry.

    Attributes:
        wrong: one line: what a user sees, or what is wrong without an error.
        remedy: one line: what a user can do.
        upstream: links to the issues and pulls that report and cure it.
        suite: the test module that shows it.
        cure: the module of this package that cures it; empty where it cures nothing.
        cured_in: the first release in which the cure is needless, as ``package version``.
    """

    id: str
    title: str
    wrong: str
    remedy: str
    upstream: tuple[str, ...]
    suite: str
    cure: str
    cured_in: str
    symptoms: tuple[Symptom, ...]
    predictions: tuple[Prediction, ...]

    def predict(self, subject: str, strategy: str, versions: Mapping[str, str]) -> Prediction | None:
        """The first prediction that applies; for ``corrected`` it is ``ok`` unless one says otherwise."""
        for prediction in self.predictions:
            if prediction.applies(subject, strategy, versions):
                return prediction
        if subject == "corrected":
            return Prediction(Verdict.OK, subject, {}, (), "the corrected trainer is right everywhere")
        return None

    def shows(self, mro: tuple[str, ...], message: str) -> bool:
        """Whether an exception is this issue's symptom."""
        return any(symptom.matches(mro, message) for symptom in self.symptoms)


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


@lru_cache
def load(path: Path = _CATALOG) -> Catalog:
    """Read and check a catalogue.

    Raises:
        CatalogError: naming the file and the entry, for a missing or unknown key, verdict, subject or range.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise CatalogError(f"{path}: {error}") from error
    if raw.get("schema") != 1:
        raise CatalogError(f"{path}: schema 1 was expected, {raw.get('schema')!r} was found")
    catalog = Catalog()
    for position, entry in enumerate(raw.get("issue", []), 1):
        name = entry.get("id", f"number {position}")
        try:
            issue = _issue(entry)
        except (KeyError, TypeError, ValueError, re.error) as error:
            reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
            raise CatalogError(f"{path}: issue {name}: {reason}") from error
        if issue.id in catalog:
            raise CatalogError(f"{path}: issue {issue.id} stands there twice")
        catalog[issue.id] = issue
    return catalog


def _issue(entry: Mapping[str, Any]) -> KnownIssue:
    _known_keys(
        entry,
        {"id", "title", "wrong", "remedy", "upstream", "suite", "cure", "cured_in", "symptom", "prediction"},
    )
    return KnownIssue(
        id=entry["id"],
        title=entry["title"],
        wrong=entry["wrong"],
        remedy=entry["remedy"],
        upstream=tuple(entry["upstream"]),
        suite=entry["suite"],
        cure=entry["cure"],
        cured_in=entry["cured_in"],
        symptoms=tuple(_symptom(raw) for raw in entry.get("symptom", [])),
        predictions=tuple(_prediction(raw) for raw in entry["prediction"]),
    )


def _symptom(raw: Mapping[str, Any]) -> Symptom:
    _known_keys(raw, {"type", "text"})
    return Symptom(raw["type"], re.compile(raw["text"]))


def _prediction(raw: Mapping[str, Any]) -> Prediction:
    _known_keys(raw, {"verdict", "subject", "when", "strategies", "why"})
    when = dict(raw["when"])
    stack.check_ranges(when)
    if raw["subject"] not in SUBJECTS:
        raise ValueError(f"unknown subject {raw['subject']!r}; known are {', '.join(SUBJECTS)}")
    return Prediction(
        verdict=Verdict(raw["verdict"]),
        subject=raw["subject"],
        when=when,
        strategies=tuple(raw.get("strategies", ())),
        why=raw["why"],
    )


def _known_keys(raw: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ValueError(f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}")
