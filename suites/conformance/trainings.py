"""Trainings with settings, and what their differences from the reference mean. Runs in the test process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trlcompat import stack
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.attribution import failures_in
from pytest_trlcompat.catalog.issue import measured_with
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.conformance import rows
from pytest_trlcompat.plugin.judging import Absent, Finding

from ..in_rank import conformance, models, ppo_conformance
from ..launches import distinct
from ..ppo.runs import require_ppo
from ..sharding.trainings import WORLD_SIZE
from . import reduction
from .explanation import explained

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.catalog.issue import KnownIssue
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

__all__ = ["ConformanceTrainings"]

_TOGETHER = 8
"""Settings of one launch: they share its start, and only they are lost with it."""
_HOLD: Mapping[str, Callable[..., dict[str, dict[str, Any]]]] = {
    "grpo": conformance.hold,
    "ppo": ppo_conformance.hold,
}
"""By trainer, what trains with settings in the ranks, and compares."""


@dataclass(frozen=True)
class ConformanceTrainings:
    """
    Attributes:
        model: in the test process, which builds none.
    """

    launches: LaunchCache
    model: TinyModel
    catalog: Catalog = field(default_factory=known_issues.load)

    def judge(self, subject: str, label: str, trainer: str = "grpo") -> Finding:
        """What a setting shows: nothing, other known issues, or a finding, which is reduced to its fewest settings.

        Args:
            label: strategy and name of a setting.

        Raises:
            Absent: this release has no such trainer.
            LaunchError: the ranks ended without an answer.
        """
        row = rows.load(trainer)[label]
        of_strategy = [each for each in rows.load(trainer).values() if each.strategy == row.strategy]
        start = of_strategy.index(row) // _TOGETHER * _TOGETHER
        setting, found, evidence = self._held(trainer, subject, row, of_strategy[start : start + _TOGETHER])
        if found["failure"]:
            return Finding(Verdict.ERROR, {**evidence, "failure": found["failure"]})
        if not found["differences"]:
            return Finding(Verdict.OK, evidence)
        known = self._known(lambda issue: issue.trainer in ("", trainer))
        by, first = explained(found["differences"], setting, subject, label, stack.installed(), known)
        if first is None:
            return Finding(Verdict.BLOCKED, {"blocked_by": by[0], "symptoms_of": by, **evidence})
        fewest = reduction.smallest(setting, lambda part: self._shows(trainer, subject, row, part, first["stage"]))
        return Finding(Verdict.SILENT, {**evidence, **first, "explained_by": by, "fewest_settings": fewest})

    def judge_issue(self, issue: KnownIssue, subject: str, label: str) -> Finding:
        """Whether a setting shows one known issue.

        Raises:
            Absent: this release has no such trainer, or does not know the setting.
            LaunchError: the ranks ended without an answer.
        """
        trainer = measured_with(issue.id)
        of_trainer = rows.load(trainer)
        row = of_trainer[label]
        beside = self._known(lambda one: one.suite == issue.suite and measured_with(one.id) == trainer)
        labels = dict.fromkeys(each for one in beside.values() for each in one.strategies)
        asked = [of_trainer[each] for each in labels if of_trainer[each].strategy == row.strategy]
        setting, found, evidence = self._held(trainer, subject, row, asked)
        if "not_in_this_release" in evidence:
            raise Absent(f"this release knows no {', '.join(evidence['not_in_this_release'])}")
        if found["failure"]:
            failure = next(failures_in(found["failure"]))
            shown = issue.shows(failure.classes, failure.message, failure.location)
            return Finding(Verdict.BROKEN if shown else Verdict.ERROR, {**evidence, "failure": found["failure"]})
        others = self._known(lambda one: one.id != issue.id and one.trainer in ("", trainer))
        for number, difference in enumerate(found["differences"]):
            stage, where = difference["stage"], difference["where"]
            if any(one.matches(stage, setting, where) for one in issue.differences):
                return Finding(Verdict.SILENT, {**evidence, **difference})
            before = found["differences"][: number + 1]
            by, _ = explained(before, setting, subject, label, stack.installed(), others)
            if by and not stage.startswith(("logs[", "evaluation")):
                return Finding(Verdict.BLOCKED, {"blocked_by": by[-1], "symptoms_of": by, **evidence})
        return Finding(Verdict.OK, evidence)

    def _known(self, wanted: Callable[[KnownIssue], bool]) -> Catalog:
        return Catalog((each.id, each) for each in self.catalog.values() if wanted(each))

    def _held(
        self, trainer: str, subject: str, row: rows.Row, together: Sequence[rows.Row]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Any]]:
        """The setting, what a rank found, and the evidence that does not depend on a verdict.

        Args:
            together: rows of one launch, this one among them.
        """
        found = self._launched(trainer, subject, row.strategy, {each.name: each.setting for each in together})[row.name]
        evidence: dict[str, Any] = {"setting": dict(row.setting), "compared": found["compared"]}
        if found["unknown"]:
            evidence["not_in_this_release"] = found["unknown"]
        if found["differences"]:
            evidence["differing"] = list(dict.fromkeys(each["stage"] for each in found["differences"]))
        return row.setting, found, evidence

    def _launched(
        self, trainer: str, subject: str, strategy: str, settings: Mapping[str, Mapping[str, Any]]
    ) -> Mapping[str, dict[str, Any]]:
        """By name, what rank 0 found; a failure of any rank."""
        if trainer == "ppo":
            require_ppo()
        self.launches(models.save_model, self.model, strategy="single")
        size = 1 if strategy == "single" else WORLD_SIZE
        ranks = self.launches(
            _HOLD[trainer], subject, self.model, settings, strategy=strategy, world_size=size, sharded=False
        ).values
        failures = {name: distinct(rank[name]["failure"] for rank in ranks) for name in settings}
        return {name: {**ranks[0][name], "failure": failures[name][0] if failures[name] else None} for name in settings}

    def _shows(self, trainer: str, subject: str, row: rows.Row, setting: Mapping[str, Any], stage: str) -> bool:
        found = self._launched(trainer, subject, row.strategy, {"part": setting})["part"]
        return any(each["stage"] == stage for each in found["differences"])
