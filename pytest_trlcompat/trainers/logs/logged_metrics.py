"""Cure of ``grpo-logged-metrics`` and ``rloo-logged-metrics``: what reward functions log, on several ranks.

Reward functions log numbers by ``log_metric`` and columns by ``log_extra``, which TRL then gathers. It goes through the
names that each rank has by itself: where a rank logged none of a name, the others wait for it without end, or take its
answer for another name's. And it takes the mean of the ranks' means, however many numbers each has. The cure lets every
rank have every name before TRL gathers, with the mean of all numbers; a rank without a column has ``None`` for each of
its completions there.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import SEVERAL_RANKS, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint
from pytest_trlcompat.trainers.curing.upstream import codes_of, definitions

__all__ = ["LoggedMetricsMixin"]

_GATHERS = "_generate_and_score_completions"
_OF_A_RANK = "local_mean"
"""What the method calls the mean of a rank where it takes that of the ranks' means."""


class LoggedMetricsMixin(Cure):
    """Lets each number that a reward function of ``trl.GRPOTrainer`` or ``trl.RLOOTrainer`` logs count once."""

    _kinds: ClassVar = {
        "trainer": ("LigerGradientsMixin", "neither calls the other; it was measured here"),
        "grpo": ("OwnLogitsMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.in_grpo("GRPOTrainer._calculate_rewards", ">=1.0,<1.14"),
        PatchPoint("trl.trainer.rloo_trainer:RLOOTrainer._calculate_rewards", ">=1.0,<1.14"),
    )
    accelerator: Any
    _pending_extra_logs: dict[str, list[Any]]
    _pending_metrics: dict[str, list[float]]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        rewards = upstream._calculate_rewards(*args, **kwargs)
        if LoggedMetricsMixin._activity(type(self), self).active:
            bound = inspect.signature(upstream._calculate_rewards).bind(*args, **kwargs)
            self._share_what_was_logged(len(bound.arguments["prompts"]))
        return rewards

    def _share_what_was_logged(self, completions: int) -> None:
        from accelerate.utils import gather_object

        sums = {name: (float(sum(values)), len(values)) for name, values in self._pending_metrics.items()}
        # One collective for all names: a rank that lacks one would go on to another collective than the others.
        every = gather_object([(sums, list(self._pending_extra_logs))])
        for name in dict.fromkeys(name for numbers, _ in every for name in numbers):
            parts = [numbers[name] for numbers, _ in every if name in numbers]
            total, count = (sum(part) for part in zip(*parts, strict=True))
            self._pending_metrics[name] = [total / count]
        for column in dict.fromkeys(column for _, columns in every for column in columns):
            self._pending_extra_logs.setdefault(column, [None] * completions)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        codes = (code for _, defined, _ in definitions(trainer_class, _GATHERS) for code in codes_of(defined))
        if not any(_OF_A_RANK in code.co_varnames for code in codes):
            return Activity(False, "the trainer takes no mean of the ranks' means of what reward functions log")
        return under(trainer, "each number that a reward function logs counts once", SEVERAL_RANKS)
