"""A known issue: its symptoms, and the verdicts that it predicts for a stack."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from pytest_trlcompat import stack
from pytest_trlcompat._issue_ids import TRAINERS, kind_of, measured_with, trainer_of
from pytest_trlcompat.catalog.verdict import SUBJECTS, Verdict
from pytest_trlcompat.strategies import NAMES as STRATEGIES
from pytest_trlcompat.strategies import without_variant

if TYPE_CHECKING:
    from pytest_trlcompat.catalog.ranges import Range
    from pytest_trlcompat.training.conditions import Condition

__all__ = [
    "FINDINGS",
    "SEVERITIES",
    "SEVERITY_TEXTS",
    "STRATEGIES",
    "SUBJECTS",
    "TRAINERS",
    "WILDCARD",
    "KnownIssue",
    "Prediction",
    "ShownDifference",
    "Symptom",
    "kind",
    "measured_with",
]

FINDINGS = "conformance/test_findings.py"
"""The suite of issues that the conformance suite found: its labels are rows that show it."""


SEVERITY_TEXTS: Mapping[str, str] = {
    "weights": "another model is trained or saved",
    "crash": "the training, or what was asked of it, ends",
    "numbers": "what is logged, measured or evaluated is wrong",
    "cost": "it takes longer or more memory than it need",
    "message": "what is said or written down is wrong, and nothing else",
}
"""What an issue does at its worst, the worst first."""
SEVERITIES = tuple(SEVERITY_TEXTS)


@dataclass(frozen=True)
class Symptom:
    """How the issue shows when it raises: the exception's class name and a pattern that its text matches.

    The name is compared with those of the exception's class and of all its bases.

    Attributes:
        text: the pattern of the text.
        place: for words that other mistakes have in common with it, a pattern that the location matches as well, see
            :mod:`pytest_trlcompat._location`; not asked of a failure whose location was not kept.
    """

    type_name: str
    text: str
    place: str = ""

    # Compiled when it is first asked for: to compile all patterns takes longer than to read the catalogue.
    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.text)

    @cached_property
    def where(self) -> re.Pattern[str] | None:
        return re.compile(self.place) if self.place else None

    def matches(self, mro: tuple[str, ...], message: str, location: str = "") -> bool:
        if self.type_name not in mro or self.pattern.search(message) is None:
            return False
        return self.where is None or not location or self.where.search(location) is not None


@dataclass(frozen=True)
class ShownDifference:
    """How the issue shows in a conformance suite: a quantity that differs from the reference.

    Attributes:
        name: a pattern that the quantity's name matches as a whole, ``logs\\[kl\\]``.
        setting: values of the setting without which it does not show; of a list one.
        place: for a quantity that differs elsewhere for another reason, a pattern that begins its place:
            ``batch 0``.
    """

    name: str
    setting: Mapping[str, Any]
    place: str = ""

    @cached_property
    def quantity(self) -> re.Pattern[str]:
        return re.compile(self.name)

    @cached_property
    def where(self) -> re.Pattern[str]:
        return re.compile(self.place)

    def matches(self, quantity: str, setting: Mapping[str, Any], where: str = "") -> bool:
        has = all(
            setting.get(name) in (value if isinstance(value, list) else [value]) for name, value in self.setting.items()
        )
        return has and self.quantity.fullmatch(quantity) is not None and self.where.match(where) is not None


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
        return self.subject == subject and (not self.strategies or _matches(self.strategies, strategy))

    def applies(self, subject: str, strategy: str, versions: Mapping[str, str]) -> bool:
        return self.concerns(subject, strategy) and stack.holds(self.when, versions)

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


@dataclass(frozen=True, eq=False)
class KnownIssue:
    """A catalogue entry.

    Attributes:
        wrong: one line: what a user sees, or what is wrong without an error.
        severity: one of :data:`SEVERITIES`: what it does at its worst, on some stack.
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
        differences: by which conformance suites know it.
        trainers: whom it meets, where its id does not say so and it does not meet every trainer.
        when: conditions on a training under which it bites, see :mod:`pytest_trlcompat.training.conditions`; ``None``
            where they follow from the settings that show it, or are not known.
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
    without_trainer: tuple[str, ...] = ()
    cure_with: tuple[str, ...] = ()
    workaround: str = ""
    severity: str = SEVERITIES[0]
    differences: tuple[ShownDifference, ...] = ()
    trainers: tuple[str, ...] = ()
    when: Condition | None = None

    def meets(self, trainer: str) -> bool:
        """Whether a user of this trainer may meet it; empty: of any trainer."""
        named = self.trainers or ((self.trainer,) if self.trainer else ())
        return not trainer or not named or trainer in named

    @property
    def is_search(self) -> bool:
        """Whether its suite searches for differences of any kind: what it finds are known issues, or become such."""
        return self.id.startswith("conformance-")

    @property
    def trainer(self) -> str:
        """Whose issue it is, by its id: ``grpo``, ``ppo``, or empty for one that meets every trainer.

        What people call it: also ``rloo`` for the first trainer of that name.
        """
        return trainer_of(self.id)

    @property
    def kind(self) -> str:
        """Whose cures cure it, as :func:`measured_with` names trainers; empty for one that meets every trainer."""
        return kind_of(self.id)

    @cached_property
    def packages(self) -> tuple[str, ...]:
        """The packages whose versions its predictions look at."""
        named = {package for prediction in self.predictions for package in prediction.when}
        return tuple(package for package in stack.PACKAGES if package in named)

    @cached_property
    def _concerning(self) -> dict[tuple[str, str], tuple[Prediction, ...]]:
        """By subject and strategy: the doctor asks again and again, for every cell."""
        return {}

    @cached_property
    def is_problem_somewhere(self) -> bool:
        """Whether it is predicted to be a problem with TRL's trainer, on some stack."""
        return any(
            prediction.subject == "upstream" and prediction.verdict.is_problem for prediction in self.predictions
        )

    def labels(self) -> tuple[str, ...]:
        """The strategies under which it may show.

        Where the entry does not list them: those that its predictions name without a wildcard, or all without a
        variant where some prediction names none.
        """
        if self.strategies:
            return self.strategies
        named = [pattern for prediction in self.predictions for pattern in prediction.strategies]
        exact = [pattern for pattern in named if not WILDCARD.search(pattern)]
        plain = [
            name
            for name in STRATEGIES
            if any(not p.strategies or p.concerns(p.subject, name) for p in self.predictions)
        ]
        return tuple(dict.fromkeys([*plain, *exact]))

    def labels_among(self, considered: Sequence[str]) -> list[str]:
        """Its strategies among those considered.

        A strategy without a variant selects all its variants. A variant that the issue does not list selects its
        strategy.
        """
        known = self.labels()
        labels = [label for label in known if label in considered or kind(label) in considered]
        labels += [kind(label) for label in considered if label not in known and kind(label) in known]
        return list(dict.fromkeys(labels))

    def can_show(self, versions: Mapping[str, object]) -> bool:
        """Whether a stack has, or may have, the packages without which it cannot show; ``None``: not installed."""
        return all(versions[package] is not None for package in self.needs)

    def without_blockers(self, blockers: Collection[str] | None = None) -> tuple[Prediction, ...]:
        """Its predictions without those that some known issues stop its suite; without ``blockers``, that any does."""
        return tuple(
            prediction
            for prediction in self.predictions
            if not prediction.by or (blockers is not None and prediction.by not in blockers)
        )

    def predict(self, subject: str, strategy: str, versions: Mapping[str, str]) -> Prediction | None:
        """The first prediction that applies; for ``corrected`` it is ``ok`` unless one says otherwise."""
        concerning = self._concerning.get((subject, strategy))
        if concerning is None:
            concerning = tuple(prediction for prediction in self.predictions if prediction.concerns(subject, strategy))
            self._concerning[subject, strategy] = concerning
        for prediction in concerning:
            if stack.holds(prediction.when, versions):
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
        return self.id != other.id and self.kind in ("", measured_with(other.id))

    def may_stop_under(self, other: KnownIssue, strategy: str, versions: Mapping[str, str]) -> bool:
        """:meth:`may_stop`, and it is predicted to raise something itself, with either subject.

        Args:
            strategy: of the suite of ``other``. What is predicted under the same one counts, or under the strategy
                without its variant, or in one of :attr:`without_trainer`; of what conformance has found, whose labels
                are settings that show it, also what is predicted under whatever strategy.
        """
        if not self.may_stop(other):
            return False
        # That a release lacks the trainer of this issue's own suite says nothing of the trainer of ``other``.
        foreign = measured_with(self.id) != measured_with(other.id)
        here = [prediction for prediction in self.predictions if not (foreign and prediction.verdict is Verdict.ABSENT)]
        labels = {strategy, kind(strategy)}
        if self.strategies:
            labels &= set(self.strategies)
        # Its labels are settings that show it, and other settings may show it as well.
        if self.suite == FINDINGS:
            labels |= {label for label in self.strategies if kind(label) == kind(strategy)}
            anywhere = [self._first(here, subject, strategy, versions) for subject in SUBJECTS]
            if any(
                prediction is not None and not prediction.strategies and prediction.verdict in _RAISING
                for prediction in anywhere
            ):
                return True
        labels |= {label for label in self.without_trainer if kind(label) == kind(strategy)}
        predicted = [self._first(here, subject, label, versions) for label in labels for subject in SUBJECTS]
        return any(prediction is not None and prediction.verdict in _RAISING for prediction in predicted)

    @staticmethod
    def _first(
        predictions: Iterable[Prediction], subject: str, strategy: str, versions: Mapping[str, str]
    ) -> Prediction | None:
        return next((prediction for prediction in predictions if prediction.applies(subject, strategy, versions)), None)


_RAISING = (Verdict.BROKEN, Verdict.ERROR)
"""Verdicts of a suite that met an exception of its own issue."""
WILDCARD = re.compile(r"[*?\[]")
"""What makes a strategy in an entry a pattern of several."""


def kind(strategy: str) -> str:
    """The strategy without its variant: ``fsdp1`` of ``fsdp1-no_shard``."""
    return without_variant(strategy)


@cache
def _matches(patterns: tuple[str, ...], strategy: str) -> bool:
    # Most patterns are names, and to compile one takes longer than all that is asked of it.
    return any(
        pattern == strategy or (WILDCARD.search(pattern) and fnmatchcase(strategy, pattern)) for pattern in patterns
    )
