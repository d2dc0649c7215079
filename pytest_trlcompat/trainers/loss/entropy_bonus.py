"""Cure of ``grpo-entropy-normalizer`` and ``grpo-policy-loss-log``: what the entropy bonus weighs, and what is logged.

With ``entropy_coef`` GRPO's loss is that of the policy less the coefficient times the mean entropy per token. Some
releases of TRL weigh the tokens' entropies as the policy's loss is weighed, by tokens of the whole accumulated batch;
later ones log the policy's part divided by the accumulation steps twice. The cure sees the weight of each token's
entropy in the loss by its derivative, which costs no pass through the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint, replaced

__all__ = ["EntropyBonusMixin"]

GATHER = PatchPoint("accelerate.accelerator:Accelerator.gather")

_ROUNDING = 1e-4
"""How far the sum of float32 weights may be from what it should be."""


class EntropyBonusMixin(Cure):
    """Weighs the entropy bonus of a subclass of ``trl.GRPOTrainer`` as documented, and logs the policy's loss whole.

    Looks at what TRL's own ``_compute_loss`` returns, while it trains; terms that a user's class adds are not looked
    at. An evaluation's loss has no derivatives, and stays as it is.
    """

    _kinds: ClassVar = {
        "grpo": ("LigerSettingsMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.COMPUTE_LOSS,
        patch_points.GRPO_LOSS,
        GATHER,
        patch_points.PER_TOKEN_LOGPS_AND_ENTROPIES,
    )
    accelerator: Any
    current_gradient_accumulation_steps: int
    entropy_coef: float
    _metrics: Any
    _outputs: Any = None
    _gathered: Any = None
    _reweighed: int = 0
    _divided_twice: bool | None = None

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        if not getattr(self, "_entropy_bonus_enabled", False) or not torch.is_grad_enabled():
            return upstream.compute_loss(*args, **kwargs)
        cure = EntropyBonusMixin.__name__
        with (
            replaced(patch_points.GRPO_LOSS, self._weighing, cure),
            replaced(GATHER, self._listening, cure),
        ):
            return upstream.compute_loss(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        self._outputs = upstream._get_per_token_logps_and_entropies(*args, **kwargs)
        return self._outputs

    def _weighing(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def _compute_loss(instance: Any, *args: Any, **kwargs: Any) -> Any:
            if instance is not self:
                return upstream(instance, *args, **kwargs)
            self._outputs, self._gathered = None, []
            coefficient, logged = float(self.entropy_coef), self._policy_losses()
            before = len(logged)
            loss = upstream(instance, *args, **kwargs)
            outputs, gathered, self._outputs, self._gathered = self._outputs, self._gathered, None, None
            weights = _weights(loss, outputs)
            if weights is None:
                return loss
            steps = float(self.current_gradient_accumulation_steps)
            bonus = (weights * outputs[1]).sum()
            if len(logged) > before and steps > 1:
                self._log_whole(logged, float((loss - bonus).detach() - self._aux(outputs, steps)), gathered, steps)
            total = weights.sum(dtype=torch.float64)
            if not total:
                return loss
            # The bonus is to be minus the coefficient times the mean entropy per token, of which this micro-batch adds
            # one of `steps` parts: its tokens' weights in the loss then add up to -coefficient / steps.
            factor = -coefficient / steps / float(total)
            if abs(factor - 1) < _ROUNDING:
                return loss
            self._reweighed += 1
            return loss + (factor - 1) * bonus

        return _compute_loss

    def _listening(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def gather(accelerator: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            # TRL gathers the policy's loss, a scalar, to log it.
            if accelerator is self.accelerator and self._gathered is not None and getattr(tensor, "ndim", None) == 0:
                self._gathered.append(tensor.detach())
            return upstream(accelerator, tensor, *args, **kwargs)

        return gather

    def _policy_losses(self) -> Any:
        return self._metrics["train"]["policy_loss"]

    def _aux(self, outputs: Any, steps: float) -> float:
        """The experts' part of the loss."""
        if not getattr(self, "aux_loss_enabled", False):
            return 0.0
        return float(self.router_aux_loss_coef * outputs[2].detach()) / steps  # type: ignore[attr-defined] # TRL's

    def _log_whole(self, logged: Any, micro: float, gathered: Any, steps: float) -> None:
        """Multiply what was logged, where it is the policy's part of this micro-batch: its share of the mean."""
        # Of a loss of 0 nobody can say how often it was divided: what was seen last holds.
        if micro:
            # `micro` is divided by the steps already: TRL divides again if it gathers just that number for its log.
            self._divided_twice = any(abs(float(value) - micro) <= 1e-4 * abs(micro) for value in gathered)
        if self._divided_twice:
            logged[-1] *= steps

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if trainer is None:
            return Activity(None, "with entropy_coef: seen while it trains")
        if not getattr(trainer, "_entropy_bonus_enabled", False):
            return Activity(False, "there is no entropy bonus")
        if trainer._reweighed:
            return Activity(True, "TRL weighs the bonus by the tokens of the whole accumulated batch")
        if trainer._divided_twice:
            return Activity(True, "TRL divides the policy's logged loss by the accumulation steps twice")
        return Activity(None, "seen while it trains")


def _weights(loss: Any, outputs: Any) -> Any:
    """The weight of each token's entropy in the loss; ``None`` where it has none."""
    entropies = None if outputs is None else outputs[1]
    if not isinstance(entropies, torch.Tensor) or not entropies.requires_grad or not loss.requires_grad:
        return None
    # The graph is kept, since the training's own backward pass is still to come.
    return torch.autograd.grad(loss, entropies, retain_graph=True, allow_unused=True)[0]
