"""Trainings with settings, and what their differences from the reference mean. Runs in the test process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trlcompat import stack
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.attribution import failures_in
from pytest_trlcompat.catalog.issue import measured_with
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.conformance import driver, rows, sequential
from pytest_trlcompat.launch import LaunchError
from pytest_trlcompat.plugin.judging import Absent, Finding, Untestable

from ..in_rank import models
from ..launches import distinct, in_turn
from ..sharding.trainings import WORLD_SIZE, built_as_asked
from . import reduction
from .explanation import changes_what_follows, explained, failed_by
from .row_choice import launch_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.catalog.issue import KnownIssue
    from pytest_trlcompat.launch import LaunchResult
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

__all__ = ["ConformanceTrainings"]

_INTERPRETED = 600.0
"""Seconds of a launch whose kernels Triton's interpreter runs, the reference's too: 120 are few on a busy machine."""


def _longer(settings: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    return {"timeout": _INTERPRETED} if any(each.get("liger") == "kernels" for each in settings) else {}


@dataclass(frozen=True)
class ConformanceTrainings:
    """
    Attributes:
        model: in the test process, which builds none.
        seed: of the data.
    """

    launches: LaunchCache
    model: TinyModel
    catalog: Catalog = field(default_factory=known_issues.load)
    seed: int = 0

    def judge(self, subject: str, label: str, trainer: str) -> Finding:
        """What a setting shows: nothing, other known issues, or a finding, which is reduced to its fewest settings.

        Args:
            label: strategy and name of a setting.

        Raises:
            Absent: this release has no such trainer, or this stack not the strategy.
            LaunchError: the ranks ended without an answer.
            Untestable: something that the setting needs is not installed, or a recording does not see everything.
        """
        row = rows.load(trainer)[label]
        setting, found, evidence = self._held(trainer, subject, row)
        if found["unknown"] and not row.is_of_array:
            return Finding(Verdict.ABSENT, {"reason": _unknown(found), **evidence})
        failure, ids = self._failure(trainer, found, subject, label)
        if failure:
            evidence |= {"failure": failure, "differing": ["training"]}
            if ids:
                return Finding(Verdict.BLOCKED, {"blocked_by": ids[0], "symptoms_of": ids, **evidence})
            return Finding(Verdict.ERROR, evidence)
        if not found["differences"]:
            if found.get("shortfall"):
                raise Untestable(found["shortfall"])
            return Finding(Verdict.OK, evidence)
        known = self._known(lambda issue: issue.kind in ("", trainer))
        by, first = explained(found["differences"], setting, subject, label, stack.installed(), known)
        if first is None:
            return Finding(Verdict.BLOCKED, {"blocked_by": by[0], "symptoms_of": by, **evidence})
        fewest = reduction.smallest(setting, lambda part: self._shows(trainer, subject, row, part, first["stage"]))
        return Finding(Verdict.SILENT, {**evidence, **first, "explained_by": by, "fewest_settings": fewest})

    def judge_issue(self, issue: KnownIssue, subject: str, label: str) -> Finding:
        """Whether a setting shows one known issue. What another one explains, where it is predicted, is that one's.

        Raises:
            Absent: this release has no such trainer or does not know the setting, or this stack not the strategy.
            LaunchError: the ranks ended without an answer.
            Untestable: something that the setting needs is not installed, or a recording sees none of the quantities
                that the issue changes.
        """
        trainer = measured_with(issue.id)
        row = rows.load(trainer)[label]
        setting, found, evidence = self._held(trainer, subject, row)
        if found["unknown"] and not row.is_of_array:
            raise Absent(_unknown(found))
        text, _ = self._failure(trainer, found, subject, label)
        if text:
            failure = next(failures_in(text))
            shown = issue.shows(failure.classes, failure.message, failure.location)
            return Finding(Verdict.BROKEN if shown else Verdict.ERROR, {**evidence, "failure": text})
        others = self._known(lambda one: one.id != issue.id and one.kind in ("", trainer))
        prediction = issue.predict(subject, label, stack.installed())
        is_silent = prediction is not None and prediction.verdict is Verdict.SILENT
        for number, difference in enumerate(found["differences"]):
            stage, where = difference["stage"], difference["where"]
            shown = any(one.matches(stage, setting, where) for one in issue.differences)
            if shown and (
                is_silent or not explained([difference], setting, subject, label, stack.installed(), others)[0]
            ):
                return Finding(Verdict.SILENT, {**evidence, **difference})
            before = found["differences"][: number + 1]
            by, _ = explained(before, setting, subject, label, stack.installed(), others)
            if by and changes_what_follows(stage):
                return Finding(Verdict.BLOCKED, {"blocked_by": by[-1], "symptoms_of": by, **evidence})
        unseen = found.get("unseen", ())
        if issue.differences and all(any(map(one.quantity.fullmatch, unseen)) for one in issue.differences):
            raise Untestable(found["shortfall"])
        return Finding(Verdict.OK, evidence)

    def _known(self, wanted: Callable[[KnownIssue], bool]) -> Catalog:
        return Catalog((each.id, each) for each in self.catalog.values() if wanted(each))

    def _failure(self, trainer: str, found: Mapping[str, Any], subject: str, label: str) -> tuple[str, list[str]]:
        """What a training ended in, and the known issues that it shows.

        An error that one of them explains is no refusal of a setting.
        """
        text = str(found["failure"] or found.get("refused_with") or "")
        failures = list(failures_in(text))
        ids = failed_by(failures[0], subject, label, stack.installed(), self.catalog, trainer) if failures else []
        return text if found["failure"] or ids else "", ids

    def _held(
        self, trainer: str, subject: str, row: rows.Row
    ) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Any]]:
        """The setting, what a rank found, and the evidence that does not depend on a verdict.

        Raises:
            Absent: this release has no such trainer, or this stack not the strategy.
            Untestable: something that the setting needs is not installed.
        """
        together = launch_of(trainer, row.label).rows
        settings = {each.name: each.setting for each in together}
        partly = [each.name for each in together if each.is_of_array]
        found = self._launched(trainer, subject, row.strategy, settings, partly, row.name)
        if found.get("lacking"):
            raise Untestable(found["lacking"])
        told = ("failure", "unknown", "refused_with", "differences", "compared")
        if not any(found.get(name) for name in told):
            found = {**found, "failure": "AssertionError: nothing of this training was compared with the reference"}
        evidence: dict[str, Any] = {"setting": dict(row.setting), "compared": found["compared"]}
        if found.get("unseen"):
            evidence["not_recorded"] = found["unseen"]
        if found.get("without_reference"):
            evidence["logged_without_reference"] = found["without_reference"]
        if found["unknown"]:
            evidence["not_in_this_release"] = found["unknown"]
        if found.get(sequential.FAILED_ON):
            evidence[sequential.FAILED_ON] = found[sequential.FAILED_ON]
        if found["differences"]:
            evidence["differing"] = list(dict.fromkeys(each["stage"] for each in found["differences"]))
        return row.setting, found, evidence

    def _launched(
        self,
        trainer: str,
        subject: str,
        strategy: str,
        settings: Mapping[str, Mapping[str, Any]],
        partly: Sequence[str],
        name: str,
    ) -> Mapping[str, Any]:
        """What rank 0 found of one of the settings, which are tried together; a failure of any rank.

        Raises:
            Absent: this release has no such trainer, or this stack no FSDP2.
            LaunchError: the ranks ended without an answer for this setting.
        """
        if reason := driver.adapter_of(trainer).absence():
            raise Absent(reason)
        self.launches(models.save_model, self.model, strategy="single")
        size = 1 if strategy == "single" else WORLD_SIZE

        def launched(names: Sequence[str]) -> LaunchResult:
            return self.launches(
                *(driver.compare_with_reference, trainer, subject, self.model, {one: settings[one] for one in names}),
                *(self.seed, partly),
                strategy=strategy,
                world_size=size,
                **_longer(settings[one] for one in names),
                sharded=False,
                check=False,
                raises="original",
            )

        tried = in_turn(settings, launched)
        failures = {name: distinct(rank["failure"] for rank in each.ranks) for name, each in tried.items()}
        if strategy == "fsdp2":
            said = next((each[0] for each in (failures[name], *failures.values()) if each), None)
            built_as_asked(strategy, next((each.engines for each in tried.values()), {}), said)
        found = tried[name]
        if found.error is not None:
            raise found.error
        return {**found.ranks[0], "failure": failures[name][0] if failures[name] else None}

    def _shows(self, trainer: str, subject: str, row: rows.Row, setting: Mapping[str, Any], stage: str) -> bool:
        try:
            found = self._launched(trainer, subject, row.strategy, {"part": setting}, ["part"], "part")
        except LaunchError:  # what the reference itself refuses: one value of a setting may need another
            return False
        return any(each["stage"] == stage for each in found["differences"])


def _unknown(found: Mapping[str, Any]) -> str:
    return f"this release knows no {', '.join(found['unknown'])} as the setting has it"
