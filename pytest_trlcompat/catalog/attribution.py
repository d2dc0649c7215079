"""Which known issue stopped the suite of another one: the verdict ``blocked``.

A failure is attributed by what was seen of it, never by a prediction alone. Every failure that a suite met must be the
symptom of another known issue, which the catalogue predicts to be a problem with the same versions and strategy. If one
failure is not, it is unexplained, and the verdict stays ``error``. An issue that raises nothing cannot be seen in a
failure and is never named; what fails because of it has a ``symptom`` of its own, or stays ``error``.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_trlcompat import _location
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import ATTRIBUTED, Record, Verdict

__all__ = ["Attribution", "Failed", "attribute", "attributed", "expecting", "failures_in"]

_TEXT = re.compile(r"(?P<type>[A-Za-z_]\w*): (?P<message>.*)", re.DOTALL)
"""An exception that a suite kept as a text, ``Type: message``."""


@dataclass(frozen=True)
class Failed:
    """An exception that ended what a suite measured, or a part of it.

    Attributes:
        classes: the names of its class and bases, as far as they are known.
        location: where it was raised, see :mod:`pytest_trlcompat._location`; empty where that was not kept.
    """

    classes: tuple[str, ...]
    message: str
    location: str = ""

    @property
    def frames(self) -> tuple[str, ...]:
        """``file:function``, innermost first."""
        return _location.frames(self.location)


@dataclass(frozen=True)
class Attribution:
    """What stopped a suite.

    Attributes:
        by: the known issue that is named.
        candidates: all whose symptoms were seen, in the catalogue's order.
    """

    by: str
    candidates: tuple[str, ...]


def attribute(
    failures: Sequence[Failed],
    issue: KnownIssue,
    strategy: str,
    versions: Mapping[str, str],
    catalog: Catalog,
    predicted: Prediction | None = None,
) -> Attribution | None:
    """The known issue that stopped the suite of ``issue``; ``None`` where some failure has no such explanation.

    Where the symptoms of several were seen, the one that ``predicted`` names goes first, then the catalogue's order.
    """
    possible = [
        other for other in catalog.values() if other.symptoms and other.may_stop_under(issue, strategy, versions)
    ]
    explained = [
        {other.id for other in possible if other.shows(failure.classes, failure.message, failure.location)}
        for failure in failures
    ]
    if not explained or not all(explained):
        return None
    seen = set().union(*explained)
    candidates = tuple(other.id for other in possible if other.id in seen)
    named = predicted.by if predicted is not None and predicted.by in seen else candidates[0]
    return Attribution(named, candidates)


def attributed(
    record: Record,
    issue: KnownIssue,
    versions: Mapping[str, str],
    catalog: Catalog,
    predicted: Prediction | None = None,
) -> Record:
    """The record, ``blocked`` if other known issues explain every failure in its evidence, otherwise ``error``.

    Other verdicts stay as they are, and so does a record whose evidence has no failure, and what a conformance suite
    has explained: it looks at the setting, and at each trainer by what is predicted of it. The corrected trainer is
    ``blocked`` only where that is predicted.
    """
    if record.verdict not in (Verdict.ERROR, Verdict.BLOCKED) or record.explained:
        return record
    evidence = {name: value for name, value in record.evidence.items() if name not in _NAMED}
    failures = list(failures_in(evidence))
    if not failures:
        return record
    # What stops the corrected trainer is a mistake of this project, until a prediction says otherwise.
    allowed = record.subject != "corrected" or (predicted is not None and predicted.verdict is Verdict.BLOCKED)
    attribution = attribute(failures, issue, record.strategy, versions, catalog, predicted) if allowed else None
    if attribution is None:
        return replace(record, verdict=Verdict.ERROR, evidence=evidence)
    named = dict(zip(_NAMED, (attribution.by, list(attribution.candidates)), strict=True))
    return replace(record, verdict=Verdict.BLOCKED, evidence={**named, **evidence})


_NAMED = ATTRIBUTED[:2]
"""What the evidence of a ``blocked`` record has beside what was measured."""


def expecting(record: Record, prediction: Prediction | None) -> Record:
    """The record with what a prediction expects: a verdict, and of ``blocked`` the issue that it names."""
    evidence = {name: value for name, value in record.evidence.items() if name != "blocked_by_expected"}
    if prediction is None:
        return replace(record, expected=None, evidence=evidence)
    if record.blocked_by and prediction.by and record.blocked_by != prediction.by:
        evidence["blocked_by_expected"] = prediction.by
    return replace(record, expected=prediction.verdict, evidence=evidence)


def failures_in(evidence: object) -> Iterator[Failed]:
    """The exceptions that a suite's evidence holds.

    They are texts, ``Type: message``, or have their type and text apart, as
    :class:`~pytest_trlcompat.launch.Failure` and the PPO suites keep them; of a launch those of other ranks as well.
    """
    if isinstance(evidence, str):
        text, location = _location.apart(evidence)
        exception = _TEXT.match(text)
        if exception is not None:
            yield Failed(_mro(exception["type"]), exception["message"], location)
    elif isinstance(evidence, Mapping):
        keys = next((keys for keys in (("exception", "message"), ("type", "text")) if set(keys) <= set(evidence)), None)
        if keys is not None:
            name, message = (str(evidence[key]) for key in keys)
            classes = evidence.get("classes", ())
            classes = tuple(map(str, classes)) if isinstance(classes, (list, tuple)) else ()
            classes = classes or _mro(name)
            # A traceback is cut to its end; what was measured before the location was kept has nothing else.
            location = str(evidence.get("location", "")) or _location.of_traceback(str(evidence.get("traceback", "")))
            yield Failed(classes, message, location)
            yield from failures_in(evidence.get("other_ranks"))
        else:
            yield from _in_each(evidence.values())
    elif isinstance(evidence, (list, tuple)):
        yield from _in_each(evidence)


def _in_each(parts: Iterable[Any]) -> Iterator[Failed]:
    for part in parts:
        yield from failures_in(part)


def _mro(name: str) -> tuple[str, ...]:
    """The classes that a name tells of: a builtin exception with its bases, any other one by itself."""
    exception = getattr(builtins, name, None)
    return tuple(base.__name__ for base in exception.__mro__) if isinstance(exception, type) else (name,)
