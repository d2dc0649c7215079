"""The known issues, read from ``catalog.toml``, and what they predict for a stack.

Imports no package of the stack.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.verdict import Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pytest_trlcompat.catalog.ranges import Range

__all__ = [
    "STRATEGIES",
    "SUBJECTS",
    "TRAINERS",
    "Catalog",
    "CatalogError",
    "KnownIssue",
    "Prediction",
    "Symptom",
    "fingerprint",
    "kind",
    "load",
]

SUBJECTS = ("upstream", "corrected")
"""Whose trainer a suite runs: TRL's own, or ours."""

TRAINERS = ("grpo", "ppo")
"""Trainers that issues of their own begin with in their ids."""

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
"""The strategies; a verdict's may carry a variant after a dash, like ``fsdp1-no_shard``."""

_CATALOG = Path(__file__).with_name("catalog.toml")


class CatalogError(ValueError):
    """The catalogue, or a question to it, makes no sense."""


@dataclass(frozen=True)
class Symptom:
    """How the issue shows when it raises: the exception's class name and a pattern that its text matches.

    The name is compared with those of the exception's class and of all its bases.

    Attributes:
        where: for words that other mistakes have in common with it, a pattern that the location matches as well, see
            :mod:`pytest_trlcompat._location`; not asked of a failure whose location was not kept.
    """

    type_name: str
    pattern: re.Pattern[str]
    where: re.Pattern[str] | None = None

    def matches(self, mro: tuple[str, ...], message: str, location: str = "") -> bool:
        if self.type_name not in mro or self.pattern.search(message) is None:
            return False
        return self.where is None or not location or self.where.search(location) is not None


@dataclass(frozen=True)
class Prediction:
    """The verdict that is expected of ``subject`` where every version range holds.

    Attributes:
        strategies: to which it applies, as shell patterns (``fsdp1*``); empty means all.
        why: one line for people, shown when the prediction is wrong.
        by: of a ``blocked`` prediction the id of the known issue that stops the suite first; else empty.
    """

    verdict: Verdict
    subject: str
    when: dict[str, str]
    strategies: tuple[str, ...]
    why: str
    by: str = ""

    def concerns(self, subject: str, strategy: str) -> bool:
        """Whether it speaks of this subject and strategy, for some versions."""
        return self.subject == subject and (
            not self.strategies or any(fnmatchcase(strategy, pattern) for pattern in self.strategies)
        )

    def applies(self, subject: str, strategy: str, versions: Mapping[str, str]) -> bool:
        return self.concerns(subject, strategy) and stack.satisfied(self.when, versions)

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """``when``, to be intersected and compared."""
        from pytest_trlcompat.catalog import ranges  # pytest loads this module at every start

        return {package: ranges.parse(text) for package, text in self.when.items()}

    def describe(self) -> str:
        ranges = ", ".join(f"{package} {text}" for package, text in self.when.items()) or "every version"
        strategies = " under " + ", ".join(self.strategies) if self.strategies else ""
        by = f" by {self.by}" if self.by else ""
        return f"{self.verdict}{by} for {self.subject}{strategies} with {ranges} ({self.why})"


@dataclass(frozen=True)
class KnownIssue:
    """A catalogue entry.

    Attributes:
        wrong: one line: what a user sees, or what is wrong without an error.
        upstream: links to the issues and pulls that report and cure it.
        suite: the test module that shows it.
        cure: the module of this package that cures it; empty where none does.
        strategies: under which it may show, with the variants that its suite measures; under no other. Empty: see
            :meth:`labels`.
        needs: packages without which the issue cannot show, ``peft`` for one of adapters, beside what the strategy
            itself needs.
        without_trainer: variants among ``strategies`` in which its suite shows it without a trainer, by the library's
            own function: it then stops whatever trainer calls that under the same strategy, also where its suite's
            trainer is stopped by another issue before.
        cure_with: modules that belong to the cure as well.
        workaround: what else helps, as it would follow "or", where that cannot be derived from the predictions; what
            can is made by ``remedies``.
        blocks: ids of issues that cannot be seen where this one is ``broken``: their verdict is ``blocked``, by this
            one, for the same subject and strategies. A short form of such predictions.
    """

    id: str
    title: str
    wrong: str
    upstream: tuple[str, ...]
    suite: str
    cure: str
    symptoms: tuple[Symptom, ...]
    predictions: tuple[Prediction, ...]
    strategies: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    without_trainer: tuple[str, ...] = ()
    cure_with: tuple[str, ...] = ()
    workaround: str = ""

    @property
    def trainer(self) -> str:
        """Whose issue it is, by its id: ``grpo``, ``ppo``, or empty for one that meets every trainer."""
        return _trainer_of(self.id)

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages whose versions its predictions look at."""
        named = {package for prediction in self.predictions for package in prediction.when}
        return tuple(package for package in stack.PACKAGES if package in named)

    def labels(self) -> tuple[str, ...]:
        """The strategies under which it may show.

        Where the entry does not list them: those that its predictions name without a wildcard, or all without a
        variant where some prediction names none.
        """
        if self.strategies:
            return self.strategies
        named = [pattern for prediction in self.predictions for pattern in prediction.strategies]
        exact = [pattern for pattern in named if not _WILDCARD.search(pattern)]
        plain = [
            name
            for name in STRATEGIES
            if any(not p.strategies or p.concerns(p.subject, name) for p in self.predictions)
        ]
        return tuple(dict.fromkeys([*plain, *exact]))

    def predict(self, subject: str, strategy: str, versions: Mapping[str, str]) -> Prediction | None:
        """The first prediction that applies; for ``corrected`` it is ``ok`` unless one says otherwise."""
        for prediction in self.predictions:
            if prediction.applies(subject, strategy, versions):
                return prediction
        if subject == "corrected":
            return Prediction(Verdict.OK, subject, {}, (), "the corrected trainer is right everywhere")
        return None

    def shows(self, mro: tuple[str, ...], message: str, location: str = "") -> bool:
        """Whether an exception is this issue's symptom.

        Args:
            location: where it was raised, see :mod:`pytest_trlcompat._location`; empty where that is not known.
        """
        return any(symptom.matches(mro, message, location) for symptom in self.symptoms)

    def may_stop(self, other: KnownIssue) -> bool:
        """Whether its symptom can end the suite of ``other``: another issue, measured with the same trainer."""
        return self.id != other.id and (not self.trainer or self.trainer == _measured_with(other.id))

    def may_stop_under(self, other: KnownIssue, strategy: str, versions: Mapping[str, str]) -> bool:
        """:meth:`may_stop`, and it is predicted to raise something itself with TRL's trainer.

        Args:
            strategy: of the suite of ``other``. What is predicted under the same one counts, or under the strategy
                without its variant, or in one of :attr:`without_trainer`. Where a release lacks the trainer that this
                issue's own suite runs, that says nothing of the trainer of ``other``.
        """
        if not self.may_stop(other):
            return False
        foreign = _measured_with(self.id) != _measured_with(other.id)
        here = [each for each in self.predictions if not (foreign and each.verdict is Verdict.ABSENT)]
        labels = {strategy, kind(strategy)}
        if self.strategies:
            labels &= set(self.strategies)
        for label in {*labels, *(each for each in self.without_trainer if kind(each) == kind(strategy))}:
            found = next((each for each in here if each.applies("upstream", label, versions)), None)
            if found is not None and found.verdict in _RAISING:
                return True
        return False


_RAISING = (Verdict.BROKEN, Verdict.ERROR)
"""Verdicts of a suite that met an exception of its own issue."""
_WILDCARD = re.compile(r"[*?\[]")


def kind(strategy: str) -> str:
    """The strategy without its variant: ``fsdp1`` of ``fsdp1-no_shard``."""
    return strategy.partition("-")[0]


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


def fingerprint(path: Path = _CATALOG) -> tuple[int, int]:
    """Changes when the catalogue does; costs no reading."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@lru_cache
def load(path: Path = _CATALOG) -> Catalog:
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
    """Refuse a ``blocked`` prediction by an issue whose symptom cannot be what ended the suite."""
    for issue in catalog.values():
        for name in {prediction.by for prediction in issue.predictions if prediction.by}:
            if name not in catalog or name == issue.id:
                raise ValueError(f"issue {issue.id}: blocked by {name!r}, which is no other issue")
            if not catalog[name].may_stop(issue):
                raise ValueError(f"issue {issue.id}: blocked by {name!r}, which is of another trainer")
            if not catalog[name].symptoms:
                raise ValueError(f"issue {issue.id}: blocked by {name!r}, which has no [[issue.symptom]] to know it by")


def _trainer_of(issue_id: str) -> str:
    prefix = issue_id.partition("-")[0]
    return prefix if prefix in TRAINERS else ""


def _measured_with(issue_id: str) -> str:
    """The trainer that an issue's suite runs."""
    return _trainer_of(issue_id) or "grpo"


def _absences(entry: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The predictions for releases that have no such trainer, which come before all others."""
    if entry is None:
        return []
    _known_keys(entry, {"when", "why"})
    return [{"verdict": "absent", "subject": subject, **entry} for subject in SUBJECTS]


_ISSUE_KEYS = {
    *("id", "title", "wrong", "upstream", "suite", "cure", "symptom", "prediction"),
    *("strategies", "needs", "blocks", "without_trainer", "cure_with", "workaround"),
}


def _issue(entry: Mapping[str, Any], absent: Mapping[str, Any]) -> KnownIssue:
    _known_keys(entry, _ISSUE_KEYS)
    absences = _absences(absent.get(_measured_with(entry["id"])))
    issue = KnownIssue(
        id=_line(entry, "id"),
        title=_line(entry, "title"),
        wrong=_line(entry, "wrong"),
        upstream=_lines(entry, "upstream"),
        suite=_line(entry, "suite"),
        cure=_line(entry, "cure", may_be_empty=True),
        symptoms=tuple(_symptom(raw) for raw in entry.get("symptom", [])),
        predictions=tuple(_prediction(raw) for raw in [*absences, *entry["prediction"]]),
        strategies=_lines(entry, "strategies", default=()),
        needs=_lines(entry, "needs", default=()),
        blocks=_lines(entry, "blocks", default=()),
        without_trainer=_lines(entry, "without_trainer", default=()),
        cure_with=_lines(entry, "cure_with", default=()),
        workaround=_line(entry, "workaround") if "workaround" in entry else "",
    )
    for strategy in issue.strategies:
        if kind(strategy) not in STRATEGIES or _WILDCARD.search(strategy):
            raise ValueError(f"unknown strategy {strategy!r}; known are {', '.join(STRATEGIES)}, each with -VARIANT")
    if unlisted := sorted(set(issue.without_trainer) - set(issue.strategies)):
        raise ValueError(f"without_trainer names {', '.join(unlisted)}, which strategies does not list")
    stack.check_ranges(dict.fromkeys(issue.needs, ""))
    for prediction in issue.predictions:
        _check_patterns(prediction.strategies, issue.strategies)
    return issue


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


def _known_keys(raw: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ValueError(f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}")
