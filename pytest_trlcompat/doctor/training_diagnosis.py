"""Which known issues bite a training on a stack, which may, and how to tell. Imports no package of the stack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_trlcompat.catalog import known_issues, measurements, remedies
from pytest_trlcompat.catalog.issue import FINDINGS, SEVERITIES, STRATEGIES, KnownIssue
from pytest_trlcompat.catalog.issue import TRAINERS as MEASURED
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.measurements import Measurements
from pytest_trlcompat.catalog.regions import Projection
from pytest_trlcompat.doctor.applicable import considered_strategies
from pytest_trlcompat.doctor.biting import bites
from pytest_trlcompat.doctor.diagnosis import is_predicted
from pytest_trlcompat.doctor.effects import Effect, effects_of, uncured
from pytest_trlcompat.doctor.neighbours import Neighbours
from pytest_trlcompat.doctor.presence import check_trainer
from pytest_trlcompat.doctor.stack_spec import Mention, StackSpec, of_mentions
from pytest_trlcompat.trainers.curing.kinds import TRAINERS as CURED
from pytest_trlcompat.training import defaults
from pytest_trlcompat.training.answers import Answer, Bite, any_of
from pytest_trlcompat.training.axes import TRAINERS
from pytest_trlcompat.training.errors import TrainingError
from pytest_trlcompat.training.training import UNKNOWN, Training

__all__ = ["SCHEMA", "BitingIssue", "TrainingDiagnosis", "diagnose_training", "shown_by_stack"]

SCHEMA = 1
"""Of :meth:`TrainingDiagnosis.to_dict`; see docs/how-to/ask-the-doctor.md."""


@dataclass(frozen=True)
class BitingIssue:
    """A known issue that bites a training, or may.

    Attributes:
        effects: how it shows with the stack, under the strategies that concern the training.
        remedy: what to do.
    """

    issue: KnownIssue
    answer: Answer
    effects: tuple[Effect, ...]
    remedy: str

    @property
    def since(self) -> str:
        """The versions with which the catalogue predicts what the stack shows."""
        why = {effect.why for effect in self.effects}
        ranges = [
            ", ".join(f"{package} {text}" for package, text in prediction.when.items()) or "every version"
            for prediction in self.issue.predictions
            if prediction.subject == "upstream" and prediction.verdict.is_problem and prediction.why in why
        ]
        return "; or ".join(dict.fromkeys(ranges)) or "this stack, as measured"

    @property
    def numbers(self) -> str:
        """Where the numbers are that show it."""
        cells = list(dict.fromkeys(cell for effect in self.effects for cell in effect.confidence.cells))
        measured = f", measured in {', '.join(cells[:2])}" if cells else ", not measured in the published sweep"
        reports = f"; {' '.join(self.issue.upstream[:2])}" if self.issue.upstream else ""
        return f"suites/{self.issue.suite}{measured}{reports}"

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "id": self.issue.id,
            "title": self.issue.title,
            "severity": self.issue.severity,
            "answer": self.answer.bite.value,
            "because": list(self.answer.because),
            "look": list(self.answer.look),
            "wrong": self.issue.wrong,
            "since": self.since,
            "remedy": self.remedy,
            "numbers": self.numbers,
            "verdicts": sorted({effect.verdict.value for effect in self.effects}),
        }


@dataclass(frozen=True)
class TrainingDiagnosis:
    """The answer for one training on one stack.

    Attributes:
        bite: the issues that bite, the worst first.
        may: those of which it cannot be told, the worst first.
        clear: ids of those that do not, as the stack or the training says.
    """

    spec: StackSpec
    training: Training
    bite: tuple[BitingIssue, ...]
    may: tuple[BitingIssue, ...]
    clear: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def reaches(self, severity: str) -> bool:
        """Whether an issue of this severity or a worse one bites."""
        return any(SEVERITIES.index(each.issue.severity) <= SEVERITIES.index(severity) for each in self.bite)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema": SCHEMA,
            "stack": dict(self.spec.texts),
            "source": self.spec.source,
            "training": self.training.to_dict(),
            "notes": list(self.notes),
            "bites": [issue.to_dict() for issue in self.bite],
            "may_bite": [issue.to_dict() for issue in self.may],
            "does_not": list(self.clear),
        }


def diagnose_training(
    spec: StackSpec, catalog: Catalog, measured: Measurements, training: Training, strategies: Sequence[str] = ()
) -> TrainingDiagnosis:
    """What bites a training, by the catalogue and what was measured.

    Args:
        strategies: under which it runs, where the user says it; one of them.

    Raises:
        TrainingError: the trainer is not known.
        StrategyError: the stack has no such trainer, or not the strategy.
    """
    if not training.trainer:
        raise TrainingError(
            f"{training.source or 'the training'}: a training with its trainer was expected, the trainer is not said "
            f"there; name it by --trainer, one of {', '.join(CURED)}"
        )
    notes = list(training.notes)
    if len(strategies) == 1:
        values = {**training.values, "parallel.strategy": strategies[0]}
        training = Training(training.trainer, values, training.whole, training.source, training.notes)
    trainer = training.trainer if training.trainer in CURED else "trainer"
    if training.trainer not in MEASURED:
        notes.append(
            f"no suite trains with {TRAINERS[training.trainer]}: only what meets every trainer is known here, and an "
            "issue of its own is not"
        )
    mine = training.value("parallel.strategy")
    check_trainer(trainer, spec, catalog)
    if mine in STRATEGIES:
        considered_strategies([mine], spec, trainer)  # refuses one that the stack has not
    relevant = {issue.id: issue for issue in catalog.values() if issue.meets(trainer) and not issue.is_search}
    foreign = {issue.id for issue in catalog.values() if not issue.meets(trainer)}
    projection, neighbours = Projection(spec.versions, spec.together), Neighbours(spec, measured)
    default = defaults.of(training.trainer, spec.texts.get("trl", ""))
    found: list[BitingIssue] = []
    for issue in relevant.values():
        considered = _considered(issue, mine)
        anywhere = bites(issue, issue.labels_among(considered), training, default)
        if anywhere.bite is Bite.DOES_NOT:
            continue  # whatever the stack is; this takes less time than what the stack says
        effects = effects_of(issue, projection, neighbours, considered, foreign)
        answer = _answer(issue, effects, training, default)
        if not effects and not is_predicted(issue, issue.without_blockers(foreign), projection, considered):
            answer = Answer(Bite.CANNOT_TELL, look=("nothing is predicted for this stack", *anywhere.look))
        if answer.bite is not Bite.DOES_NOT:
            found.append(BitingIssue(issue, answer, effects, _remedy(issue, effects, trainer, spec, measured)))
    found.sort(key=lambda each: (SEVERITIES.index(each.issue.severity), each.issue.id))
    named = {each.issue.id for each in found}
    return TrainingDiagnosis(
        spec,
        training,
        tuple(each for each in found if each.answer.bites),
        tuple(each for each in found if each.answer.is_open),
        tuple(name for name in relevant if name not in named),
        tuple(notes),
    )


def shown_by_stack(trainer: str, versions: Mapping[str, str]) -> Iterator[tuple[KnownIssue, list[str], list[str], str]]:
    """The known issues that an installed stack shows to users of a trainer, whatever their settings.

    Returns:
        The issue; the labels under which it shows whatever other issues do; the mixins and configs that cure it for
        this trainer; and why these are not enough, empty where they are.
    """
    catalog = known_issues.load()
    measured = measurements.published(catalog)
    mentions = [Mention.of_version(package, version, "installed here") for package, version in versions.items()]
    spec = of_mentions(mentions, "installed here", complete=True)
    kind = trainer if trainer in CURED else "trainer"
    foreign = {issue.id for issue in catalog.values() if not issue.meets(kind)}
    projection, neighbours = Projection(spec.versions, spec.together), Neighbours(spec, measured)
    for issue in catalog.values():
        if issue.meets(kind) and not issue.is_search:
            effects = effects_of(issue, projection, neighbours, STRATEGIES, foreign)
            if labels := _labels(_certain(effects)):
                ways = measured.ways(issue)
                cures = [*remedies.mixins(issue, kind, ways), *ways.configs]
                yield issue, labels, cures, uncured(issue, projection, effects)


def _considered(issue: KnownIssue, mine: Any) -> tuple[str, ...]:
    """The strategies whose labels say something of this training; what one process computes wrongly, ranks do too."""
    if mine is UNKNOWN or mine not in STRATEGIES:
        return STRATEGIES
    return STRATEGIES if issue.suite == FINDINGS else (mine,)


def _answer(issue: KnownIssue, effects: Sequence[Effect], training: Training, default: defaults.Default) -> Answer:
    """What the labels say that show it: with this stack, with a part of the versions that it may have, or behind
    another issue that stops its test first."""
    answers = [bites(issue, _labels(_certain(effects)), training, default)]
    for effect in effects:
        if effect.blocked_by and effect.otherwise:
            answers.append(
                bites(issue, _labels([effect]), training, default, f"{effect.blocked_by} stops its test first")
            )
        elif effect.condition and not effect.blocked_by:
            answers.append(bites(issue, _labels([effect]), training, default, f"only with {effect.condition}"))
    return any_of(answers)


def _certain(effects: Sequence[Effect]) -> list[Effect]:
    """Those that show with every version that the stack may have, whatever other issues do."""
    return [effect for effect in effects if not effect.blocked_by and not effect.condition]


def _labels(effects: Sequence[Effect]) -> list[str]:
    return [label for effect in effects for label in effect.strategies]


def _remedy(issue: KnownIssue, effects: Sequence[Effect], trainer: str, spec: StackSpec, measured: Measurements) -> str:
    return remedies.remedy(issue, _labels(effects), trainer=trainer, versions=spec.versions, ways=measured.ways(issue))
