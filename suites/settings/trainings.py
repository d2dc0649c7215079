"""One training per subject and row of the table, and the same in one process. Runs in the test process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Absent, Finding, Untestable
from pytest_trlcompat.tiny import ArchitectureAbsent

from ..in_rank import models, settings
from ..sharding.trainings import WORLD_SIZE, built_as_asked
from .equivalence import judge_setting
from .table import Row, row

if TYPE_CHECKING:
    from pytest_trlcompat.plugin.judging import Judge
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

__all__ = ["SettingTrainings"]

_NEIGHBOURS = (1, 2, 3)
"""Seeds by which weights are changed to measure what rounding does."""


@dataclass(frozen=True)
class SettingTrainings:
    """
    Attributes:
        models: by the value of the axis, in the test process, which builds none.
    """

    launches: LaunchCache
    models: Mapping[str, Callable[[], TinyModel]]

    def judge_row(self, judge: Judge, subject: str, label: str) -> None:
        """Give the verdict of :meth:`judge` for the row of the table with this label."""
        judge(lambda: self.judge(judge.issue.id, subject, row(label)), subject=subject, strategy=label)

    def judge(self, issue: str, subject: str, row: Row) -> Finding:
        """
        Args:
            issue: whose symptoms make a failure ``broken``.

        Raises:
            Absent, LaunchError: see :meth:`ranks_and_one_process`.
        """
        ranks, in_one_process = self.ranks_and_one_process(subject, row)
        finding = judge_setting(issue, ranks, in_one_process)
        if finding.verdict is Verdict.OK:
            # Otherwise equal numbers would say nothing of a quantised base.
            quantised = {rank["quantised"] for rank in ranks}, {training["quantised"] for training in in_one_process}
            assert quantised == ({row.values["adapter"] == "qlora"}, {False}), quantised
            compiled = all(rank["compiled"] for rank in ranks) or not row.values["compile"]
            if not compiled or not set(row.checkpointing) <= set(finding.evidence["checkpointing"]):
                return Finding(Verdict.WASTEFUL, {**finding.evidence, "compiled": compiled})
        return finding

    def ranks_and_one_process(
        self, subject: str, row: Row, neighbours: bool = True
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """What each rank of the row's training measured, and the same of one process: as it is, and its neighbours.

        Args:
            neighbours: whether the latter are needed, of a row that is not float32.

        Raises:
            Absent: this release of the stack has no such model or strategy.
            Untestable: it takes longer than a launch may.
            LaunchError: it failed before there was anything to measure.
        """
        if row.values["compile"] and row.strategy == "zero3":
            raise Untestable("torch.compile under ZeRO-3 takes minutes: each of DeepSpeed's hooks breaks its graph")
        try:
            model = self.models[row.values["model"]]()
            model.check_present()
        except ArchitectureAbsent as error:
            raise Absent(str(error)) from error
        self.launches(models.save_model, model, strategy="single")
        setting, rate = row.setting_of_one_process, settings.LEARNING_RATE
        if setting.get("precision") == "bf16_weights":
            rate = settings.LEARNING_RATE_OF_BF16
            # DeepSpeed keeps a copy in float32, as mixed precision does.
            if row.strategy.startswith("zero"):
                setting = {**setting, "precision": "bf16"}
        # In float32 the tolerances are fixed, and nothing is measured of neighbours.
        seeds = (0, *_NEIGHBOURS) if "precision" in setting and neighbours else (0,)
        alone = self.launches(
            settings.trainings_of_neighbours, subject, model, setting, seeds, rate, strategy="single"
        ).values[0]
        result = self.launches(
            settings.train,
            subject,
            model,
            row.setting,
            rate,
            strategy=row.strategy,
            options=row.options,
            world_size=1 if row.strategy == "single" else WORLD_SIZE,
            # A broken trainer fails before it has wrapped anything.
            sharded=False,
        )
        failures = [rank["failure"] for rank in result.values if rank["failure"]]
        if row.strategy != "single":
            built_as_asked(row.strategy, result.ranks[0].proof["engines"], failures[0] if failures else None)
        return result.values, alone
