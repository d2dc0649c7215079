"""Whether a stack's TRL has a trainer, and what it calls it: by the releases' sources, and by the catalogue."""

from __future__ import annotations

from collections import Counter

from pytest_trlcompat.catalog.issue import TRAINERS as MEASURED
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.ranges import ALL, Range, parse
from pytest_trlcompat.catalog.regions import Projection
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.applicable import StrategyError
from pytest_trlcompat.doctor.stack_spec import StackSpec
from pytest_trlcompat.trainers.curing.kinds import TRAINERS
from pytest_trlcompat.training import trl_trainers

__all__ = ["check_trainer", "class_in"]


def check_trainer(trainer: str, spec: StackSpec, catalog: Catalog) -> None:
    """
    Raises:
        StrategyError: the stack's trl has no such trainer, by all that the catalogue predicts of it, or by the sources
            of the releases.
    """
    if trainer in MEASURED:
        _check_by_predictions(trainer, spec, catalog)
    if (versions := spec.versions.get("trl", ALL)) is None:
        return
    spans = trl_trainers.spans_of(trainer)
    if spans and not any(_releases(span).meets(versions) for span in spans):
        ended = [span for span in spans if span.left and parse(f">={span.left}").covers(versions)]
        why = f"{ended[-1].name} left it with {ended[-1].left}" if ended else f"{spans[0].name} came later"
        raise StrategyError(_absent_text(trainer, spec, why))


def _check_by_predictions(trainer: str, spec: StackSpec, catalog: Catalog) -> None:
    projection = Projection({"trl": spec.versions.get("trl", ALL)})
    predictions = [
        prediction
        for issue in catalog.values()
        if issue.trainer == trainer  # of either RLOO: a release has one of them
        for label in issue.labels()
        for prediction in projection.regions(issue.predictions, "upstream", label).predicted.values()
        if prediction is not None
    ]
    if predictions and all(prediction.verdict is Verdict.ABSENT for prediction in predictions):
        (why, _), *_ = Counter(prediction.why for prediction in predictions).most_common(1)
        raise StrategyError(_absent_text(trainer, spec, why))


def _releases(span: trl_trainers.Span) -> Range:
    return parse(f">={span.since},<{span.left}" if span.left else f">={span.since}")


def _absent_text(trainer: str, spec: StackSpec, why: str) -> str:
    releases = trl_trainers.where(trainer)
    having = f"{releases} has it; name one of these" if releases else "name a release of trl that has it"
    stack = f"trl {spec.texts.get('trl', '')} ({spec.source})"
    return f"trainer {trainer} is absent with {stack}: {why}; {having}, or another trainer"


def class_in(trainer: str, spec: StackSpec) -> str:
    """What the stack's release of TRL calls a trainer."""
    versions = spec.versions.get("trl", ALL)
    named = [span.name for span in trl_trainers.spans_of(trainer) if versions and _releases(span).meets(versions)]
    return named[-1] if named else TRAINERS[trainer]
