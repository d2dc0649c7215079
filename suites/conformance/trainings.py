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
from ..launches import Turns, distinct
from ..sharding.trainings import WORLD_SIZE, built_as_asked
from . import reduction
from .explanation import changes_what_follows, explained, failed_by
from .row_choice import launch_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.catalog.issue import KnownIssue
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

__all__ = ["ConformanceTrainings"]

_INTERPRETED = 600.0
"""Seconds of a launch whose kernels Triton's interpreter runs, the reference's too: 120 are few on a busy machine."""


def _longer(settings: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    return {"timeout": _INTERPRETED} if any(setting.get("liger") == "kernels" for setting in settings) else {}


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
        setting, result, evidence = self._compared(trainer, subject, row)
        if result["unknown"] and not row.is_of_array:
            return Finding(Verdict.ABSENT, {"reason": _unknown(result), **evidence})
        failure, ids = self._failure(trainer, result, subject, label)
        if failure:
            evidence |= {"failure": failure, "differing": ["training"]}
            if ids:
                return Finding(Verdict.BLOCKED, {"blocked_by": ids[0], "symptoms_of": ids, **evidence})
            return Finding(Verdict.ERROR, evidence)
        if not result["differences"]:
            if result.get("shortfall"):
                raise Untestable(result["shortfall"])
            return Finding(Verdict.OK, evidence)
        known = self._known(lambda issue: issue.kind in ("", trainer))
        by, first = explained(result["differences"], setting, subject, label, stack.installed(), known)
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
        setting, result, evidence = self._compared(trainer, subject, row)
        if result["unknown"] and not row.is_of_array:
            raise Absent(_unknown(result))
        text, _ = self._failure(trainer, result, subject, label)
        if text:
            failure = next(failures_in(text))
            shown = issue.shows(failure.classes, failure.message, failure.location)
            return Finding(Verdict.BROKEN if shown else Verdict.ERROR, {**evidence, "failure": text})
        others = self._known(lambda other: other.id != issue.id and other.kind in ("", trainer))
        prediction = issue.predict(subject, label, stack.installed())
        is_silent = prediction is not None and prediction.verdict is Verdict.SILENT
        for number, difference in enumerate(result["differences"]):
            stage, where = difference["stage"], difference["where"]
            shown = any(pattern.matches(stage, setting, where) for pattern in issue.differences)
            # Where this issue is predicted, the difference is its own, whichever other one could explain it too.
            if shown and (
                is_silent or not explained([difference], setting, subject, label, stack.installed(), others)[0]
            ):
                return Finding(Verdict.SILENT, {**evidence, **difference})
            before = result["differences"][: number + 1]
            by, _ = explained(before, setting, subject, label, stack.installed(), others)
            if by and changes_what_follows(stage):
                # Several explain it alike: the catalogue says which one to name, its order says nothing.
                named = prediction.by if prediction is not None and prediction.by in by else by[-1]
                return Finding(Verdict.BLOCKED, {"blocked_by": named, "symptoms_of": by, **evidence})
        unseen = result.get("unseen", ())
        if issue.differences and all(any(map(pattern.quantity.fullmatch, unseen)) for pattern in issue.differences):
            raise Untestable(result["shortfall"])
        return Finding(Verdict.OK, evidence)

    def _known(self, concerns: Callable[[KnownIssue], bool]) -> Catalog:
        return Catalog((issue.id, issue) for issue in self.catalog.values() if concerns(issue))

    def _failure(self, trainer: str, result: Mapping[str, Any], subject: str, label: str) -> tuple[str, list[str]]:
        """What a training ended in, and the known issues that it shows.

        An error that one of them explains is no refusal of a setting.
        """
        text = str(result["failure"] or result.get("refused_with") or "")
        failures = list(failures_in(text))
        ids = failed_by(failures[0], subject, label, stack.installed(), self.catalog, trainer) if failures else []
        return text if result["failure"] or ids else "", ids

    def _compared(
        self, trainer: str, subject: str, row: rows.Row
    ) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Any]]:
        """The setting, what a rank found, and the evidence that does not depend on a verdict.

        Raises:
            Absent: this release has no such trainer, or this stack not the strategy.
            Untestable: something that the setting needs is not installed.
        """
        together = launch_of(trainer, row.label).rows
        settings = {launched_row.name: launched_row.setting for launched_row in together}
        partly = [launched_row.name for launched_row in together if launched_row.is_of_array]
        result = self._launched(trainer, subject, row.strategy, settings, partly, row.name)
        if result.get("lacking"):
            raise Untestable(result["lacking"])
        # A result that tells none of these would pass for a training that is right.
        told = ("failure", "unknown", "refused_with", "differences", "compared")
        if not any(result.get(name) for name in told):
            result = {**result, "failure": "AssertionError: nothing of this training was compared with the reference"}
        evidence: dict[str, Any] = {"setting": dict(row.setting), "compared": result["compared"]}
        if result.get("unseen"):
            evidence["not_recorded"] = result["unseen"]
        if result.get("without_reference"):
            evidence["logged_without_reference"] = result["without_reference"]
        if result["unknown"]:
            evidence["not_in_this_release"] = result["unknown"]
        if result.get(sequential.FAILED_ON):
            evidence[sequential.FAILED_ON] = result[sequential.FAILED_ON]
        if result["differences"]:
            evidence["differing"] = list(dict.fromkeys(difference["stage"] for difference in result["differences"]))
        return row.setting, result, evidence

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

        turns = Turns(settings)
        for names in turns:
            chosen = {row_name: settings[row_name] for row_name in names}
            launched = self.launches(
                *(driver.compare_with_reference, trainer, subject, self.model, chosen, self.seed, partly),
                strategy=strategy,
                world_size=size,
                **_longer(chosen.values()),
                sharded=False,
                check=False,
                raises="original",
            )
            turns.judge(launched)
        tried = turns.tried
        failures = {name: distinct(rank["failure"] for rank in training.ranks) for name, training in tried.items()}
        # Releases whose Trainer prepares its model alone cannot train under FSDP2; their failure tells.
        if strategy == "fsdp2":
            failure = next((texts[0] for texts in (failures[name], *failures.values()) if texts), None)
            built_as_asked(strategy, next((training.engines for training in tried.values()), {}), failure)
        training = tried[name]
        if training.error is not None:
            raise training.error
        return {**training.ranks[0], "failure": failures[name][0] if failures[name] else None}

    def _shows(self, trainer: str, subject: str, row: rows.Row, setting: Mapping[str, Any], stage: str) -> bool:
        try:
            result = self._launched(trainer, subject, row.strategy, {"part": setting}, ["part"], "part")
        # The reference itself may refuse a part of a setting: one value may need another.
        except LaunchError:
            return False
        return any(difference["stage"] == stage for difference in result["differences"])


def _unknown(result: Mapping[str, Any]) -> str:
    return f"this release knows no {', '.join(result['unknown'])} as the setting has it"
