"""Cure of ``ppo-mini-batches``, ``ppo-last-batch-accumulation`` and ``first-rloo-last-batch-accumulation``: PPO, and
the first RLOO, step once for each mini-batch.

TRL's PPO trainer, whose training loop TRL's first RLOO trainer has, too, goes through each batch within
``Accelerator.accumulate``, one micro-batch at a time, and Accelerate decides when the optimizer steps. It counts to
``gradient_accumulation_steps``, which in newer releases of PPO is the number of micro-batches of the whole batch and
not of a mini-batch: one step is taken for all of them. And at the end of the data loader, where it expects no more
micro-batches, it steps after each: of a batch's micro-batches all that the last batch of the dataset is split into. The
cure has it count the micro-batches of a mini-batch, and look at nothing else.

What is logged of updates is an average over a table with a place for each of ``gradient_accumulation_steps``
micro-batches of every mini-batch. Where a mini-batch has fewer, the rest of the places are 0 and count. The cure takes
them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ACCUMULATION, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError, leaving_out

__all__ = ["PPOOptimizerStepsMixin"]

_MEAN_RATIO, _VARIANCE = "val/ratio", "val/ratio_var"
_MEANS = (
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "policy/entropy_avg",
    "loss/policy_avg",
    "loss/value_avg",
    "val/clipfrac_avg",
    _MEAN_RATIO,
)
"""What is an average over the table; ``_VARIANCE`` is divided by the number of places less 1."""


class PPOOptimizerStepsMixin(Cure):
    """Lets a subclass of TRL's PPO trainer, or of its first RLOO trainer, take one optimizer step for each
    mini-batch, in every batch.

    Where ``gradient_accumulation_steps`` is 1 there is nothing to count, and the numbers are upstream's.

    Raises:
        CureError: under DeepSpeed, whose engine counts by itself, if it counts another number of micro-batches.
    """

    _kinds: ClassVar = {
        "ppo": ("", "its train calls all others"),
        "first_rloo": ("", "of RLOO up to 0.21 alone: in front of what any trainer gets"),
    }
    _points: ClassVar[patch_points.Points] = (*patch_points.ppo_methods("train"), patch_points.trainer_method("log"))
    _needed: ClassVar = (ACCUMULATION,)
    accelerator: Any
    args: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        if not ACCUMULATION.holds(self):
            return upstream.train(*args, **kwargs)
        with self._counting_micro_batches():
            return upstream.train(*args, **kwargs)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        upstream: Any = super()
        upstream.log(self._without_empty_places(logs), *args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "Accelerate counts otherwise than TRL splits batches", *cls._needed)

    @contextmanager
    def _counting_micro_batches(self) -> Iterator[None]:
        micro_batches = self._micro_batches()
        wrapped = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        if wrapped is not None and self.args.num_mini_batches > 1:
            _check_engine(wrapped.engine, micro_batches)
        # All accelerators of a process share it.
        counting = self.accelerator.gradient_state.plugin_kwargs
        before = dict(counting)
        counting.update(num_steps=micro_batches, sync_with_dataloader=False)
        # Accelerate would go on counting in the midst of a mini-batch if an earlier loop has ended there.
        self.accelerator.step = 0
        try:
            yield
        finally:
            counting.clear()
            counting.update(before)

    def _micro_batches(self) -> int:
        """Of a mini-batch on a rank; rounded up, as TRL's loop over a mini-batch ends with the rows that are left."""
        return int(-(-self.args.local_mini_batch_size // self.args.per_device_train_batch_size))

    def _without_empty_places(self, logs: dict[str, Any]) -> dict[str, Any]:
        settings = self.args
        filled, places = self._micro_batches(), settings.gradient_accumulation_steps
        if filled == places or not {*_MEANS, _VARIANCE} <= set(logs):
            return logs
        tables = self.accelerator.num_processes * settings.num_ppo_epochs * settings.num_mini_batches
        count, all_places = tables * filled, tables * places
        means = {name: logs[name] * places / filled for name in _MEANS}
        # The sum of squares, to which empty places add nothing: (n - 1) variances plus n times the squared mean.
        squares = logs[_VARIANCE] * (all_places - 1) + all_places * logs[_MEAN_RATIO] ** 2
        variance = (squares - count * means[_MEAN_RATIO] ** 2) / (count - 1) if count > 1 else float("nan")
        # Of one number torch's variance is NaN, too; rounding may take one of equal numbers below 0.
        return {**logs, **means, _VARIANCE: variance if count == 1 else max(variance, 0.0)}


def _check_engine(engine: Any, micro_batches: int) -> None:
    counted = engine.gradient_accumulation_steps()
    if counted != micro_batches:
        raise CureError(
            PPOOptimizerStepsMixin.__name__,
            expected=f"an engine of DeepSpeed that steps after the {micro_batches} micro-batches of a mini-batch",
            seen=f"it steps after {counted}",
            packages=("trl", "deepspeed"),
            remedy="Set num_mini_batches=1, or gradient_accumulation_steps=1"
            + leaving_out(PPOOptimizerStepsMixin.__name__),
        )
