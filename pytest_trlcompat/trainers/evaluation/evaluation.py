"""Cure of ``grpo-evaluate``, ``grpo-eval-metrics`` and ``grpo-eval-accumulation``: GRPO's evaluation.

- ``grpo-evaluate``: TRL may have no ``prediction_step``, and Transformers' own takes the prompts for tensors: ``'list'
  object has no attribute 'get'``. The cure has one.
- ``grpo-eval-metrics``: TRL may keep the metrics of training and evaluation in one place, or distinguish them by
  whether an evaluation is due. Rewards and KL of one are then averaged with those of the other, and an ``evaluate()``
  that the training did not ask for logs none, and takes its completions out of the training's buffer. The cure keeps
  them apart.
- ``grpo-eval-accumulation``: TRL may divide the loss by the number of accumulated gradients in evaluation as well: too
  small an ``eval_loss``, and before training no attribute ``current_gradient_accumulation_steps``. The cure sets that
  number to 1 while an evaluation lasts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import defined_by
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.upstream import function_uses, loss_uses, method_uses, path_uses

__all__ = ["EvaluationMixin"]

_MISSING = object()


class EvaluationMixin(Cure):
    """Lets a subclass of ``trl.GRPOTrainer`` evaluate: at any time, the whole loss, and its own metrics.

    It knows by the methods that TRL defines, by the shape of its metrics and by the names that its code uses.
    """

    _kinds: ClassVar = {
        "grpo": ("DecayedNormsMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.EVALUATE,
        patch_points.trainer_method("prediction_step"),
        patch_points.in_grpo("GRPOTrainer.log"),
        patch_points.PREPARE_INPUTS,
        patch_points.COMPUTE_LOSS,
    )
    _metrics: Any
    control: Any
    model: Any

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        with self._own_metrics(), self._whole_loss():
            return upstream.evaluate(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        if not _lacks_prediction_step(type(self)):
            return upstream.prediction_step(model, inputs, *args, **kwargs)
        trainer: Any = self
        inputs = trainer._prepare_inputs(inputs)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs)
        # Neither logits nor labels, as the prediction_step of later releases of TRL.
        return loss.mean().detach(), None, None

    def _prepare_inputs(self, inputs: Any) -> Any:
        upstream: Any = super()
        with self._mode(evaluating=not self.model.training):
            return upstream._prepare_inputs(inputs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        with self._mode(evaluating=not self.model.training):
            return upstream.compute_loss(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        upstream: Any = super()
        # TRL's own `log` knows an evaluation by the first name, too.
        evaluating = next(iter(logs), "").startswith("eval_")
        if evaluating and self._is_flat() and not function_uses(upstream.log, "startswith"):
            # trl 0.14.0 would log them under the names of training.
            self._metrics = defaultdict(list, {f"eval_{name}": values for name, values in self._metrics.items()})
        with self._mode(evaluating):
            upstream.log(logs, *args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if _lacks_prediction_step(trainer_class):
            return Activity(True, "TRL has no prediction_step")
        flat = not method_uses(trainer_class, "log", "train") if trainer is None else trainer._is_flat()
        if flat:
            return Activity(True, "TRL keeps the metrics of training and evaluation in one place")
        if _asks_what_is_due(trainer_class):
            return Activity(True, "TRL takes an evaluation that is due for one that runs")
        if not loss_uses(trainer_class, "current_gradient_accumulation_steps"):
            return Activity(False, "TRL evaluates with metrics of its own, and divides no loss")
        return Activity(None, "where it evaluates: TRL divides the loss, which is not seen to be in training alone")

    @contextmanager
    def _own_metrics(self) -> Iterator[None]:
        """Keep what training has gathered since its last log out of an evaluation's metrics."""
        if not self._is_flat():
            yield
            return
        pending, self._metrics = self._metrics, defaultdict(list)
        try:
            yield
        finally:
            self._metrics = pending

    @contextmanager
    def _whole_loss(self) -> Iterator[None]:
        """Let nothing be accumulated while an evaluation lasts."""
        before = getattr(self, "current_gradient_accumulation_steps", _MISSING)
        self.current_gradient_accumulation_steps: Any = 1
        try:
            yield
        finally:
            if before is _MISSING:
                del self.current_gradient_accumulation_steps
            else:
                self.current_gradient_accumulation_steps = before

    @contextmanager
    def _mode(self, evaluating: bool) -> Iterator[None]:
        """Show trl 0.16 and 0.17 an evaluation that is due if, and only if, one is running."""
        cls: Any = type(self)
        if self.control.should_evaluate == evaluating or not _asks_what_is_due(cls):
            yield
            return
        self.control.should_evaluate = evaluating
        try:
            yield
        finally:
            # Unless a callback has decided otherwise meanwhile.
            if self.control.should_evaluate == evaluating:
                self.control.should_evaluate = not evaluating

    def _is_flat(self) -> bool:
        """Whether TRL keeps all metrics in one place; later releases keep one for each mode."""
        return "train" not in self._metrics


def _lacks_prediction_step(cls: type) -> bool:
    """Whether the one that runs is Transformers' own."""
    behind = EvaluationMixin if EvaluationMixin in cls.__mro__ else None
    return defined_by(cls, "prediction_step", behind) == "transformers"


def _asks_what_is_due(cls: type) -> bool:
    """Whether TRL, or what a user has put in its place, takes an evaluation that is due for one that runs."""
    return path_uses(cls, "should_evaluate", *_MODES) is True


_MODES = ("_prepare_inputs", "_generate_and_score_completions", "compute_loss", "_compute_loss", "log")
"""The methods in which TRL asks whether it trains or evaluates."""
