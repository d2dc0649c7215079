"""What an optimizer step does with gradients: clipping, SGD, AdamW, and the learning rate's schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "AdamWState",
    "adamw_step",
    "clip_gradients",
    "decayed_parameters",
    "gradient_norm",
    "learning_rate_factor",
    "mix_weights",
    "sgd_step",
]

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class AdamWState:
    """The moments of AdamW before a step: empty before the first one.

    Attributes:
        steps: how many steps were made.
        first, second: running means of gradients and of their squares, by the parameter's name.
    """

    steps: int = 0
    first: Tensors = field(default_factory=dict)
    second: Tensors = field(default_factory=dict)


def gradient_norm(gradients: Tensors) -> Tensor:
    """Euclidean norm of all gradients as one vector, a scalar: ``grad_norm`` in the logs, before clipping."""
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm()


def clip_gradients(gradients: Tensors, max_norm: float | None) -> dict[str, Tensor]:
    """All gradients scaled by ``min(1, max_norm / (norm + 1e-6))``.

    Source: ``max_grad_norm`` of ``TrainingArguments``; documentation of ``torch.nn.utils.clip_grads_with_norm_``, which
    has the summand 1e-6. Undecided by the documentation: 0, which is taken for no clipping, like ``None``.
    """
    if not max_norm:
        return dict(gradients)
    scale = (max_norm / (gradient_norm(gradients) + 1e-6)).clamp(max=1.0)
    return {name: gradient * scale.to(gradient.dtype) for name, gradient in gradients.items()}


def sgd_step(
    weights: Tensors, gradients: Tensors, *, lr: float, weight_decay: float = 0.0, decayed: Set[str] = frozenset()
) -> dict[str, Tensor]:
    """The weights after a step of plain gradient descent: ``w - lr (g + weight_decay w)``; decay for ``decayed`` alone.

    Source: documentation of ``torch.optim.SGD`` without momentum, which ``optim="sgd"`` names.
    """
    return {
        name: weight - lr * (gradients[name] + (weight_decay if name in decayed else 0.0) * weight)
        for name, weight in weights.items()
    }


def adamw_step(
    weights: Tensors,
    gradients: Tensors,
    state: AdamWState,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decayed: Set[str] = frozenset(),
) -> tuple[dict[str, Tensor], AdamWState]:
    """The weights after a step of AdamW, and its state.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2, in the form that the
    documentation of ``torch.optim.AdamW`` gives: weights decay by ``lr * weight_decay`` before the step.

    Args:
        weights, gradients: by name, of the same shapes.
        decayed: names of the parameters that decay, see :func:`decayed_parameters`.
    """
    steps = state.steps + 1
    first, second, after = {}, {}, {}
    for name, weight in weights.items():
        gradient = gradients[name]
        m, v = state.first.get(name, torch.zeros_like(weight)), state.second.get(name, torch.zeros_like(weight))
        first[name] = betas[0] * m + (1 - betas[0]) * gradient
        second[name] = betas[1] * v + (1 - betas[1]) * gradient**2
        unbiased = first[name] / (1 - betas[0] ** steps), second[name] / (1 - betas[1] ** steps)
        decayed_weight = weight * (1 - lr * (weight_decay if name in decayed else 0.0))
        after[name] = decayed_weight - lr * unbiased[0] / (unbiased[1].sqrt() + eps)
    return after, AdamWState(steps, first, second)


def decayed_parameters(model: Any) -> frozenset[str]:
    """Names of the parameters that weight decay applies to: "all layers except all bias and LayerNorm weights".

    Source: ``weight_decay`` of ``TrainingArguments``. Undecided by the documentation: what a LayerNorm is; here every
    module whose class name contains ``norm``, that is RMSNorm, too.
    """
    norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters()
    }
    return frozenset(
        name for name, _ in model.named_parameters() if name not in norms and name.rpartition(".")[2] != "bias"
    )


def learning_rate_factor(kind: str, step: int, *, total: int, warmup: int = 0) -> float:
    """What the learning rate of a step is multiplied by.

    After a linear increase from 0 over ``warmup`` steps (none for ``"constant"``): 1 (``"constant"``,
    ``"constant_with_warmup"``), a linear decrease to 0 at ``total`` (``"linear"``), or half a cosine to 0
    (``"cosine"``).

    Source: https://huggingface.co/docs/transformers/main_classes/optimizer_schedules.

    Args:
        step: 0 for the first optimizer step.
        total: steps of the whole training.

    Raises:
        ValueError: for another schedule.
    """
    if kind == "constant":
        return 1.0
    if kind not in ("constant_with_warmup", "linear", "cosine"):
        raise ValueError(f"lr_scheduler_type={kind!r} is not part of the reference")
    if step < warmup:
        return step / warmup
    if kind == "constant_with_warmup":
        return 1.0
    done = (step - warmup) / max(1, total - warmup)
    return max(0.0, 1.0 - done) if kind == "linear" else max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))


def mix_weights(policy: Tensors, reference: Tensors, alpha: float) -> dict[str, Tensor]:
    """``alpha * policy + (1 - alpha) * reference``, the reference model's weights after a synchronisation.

    Source: ``ref_model_mixup_alpha`` of ``GRPOConfig``; TR-DPO, soft update.
    """
    return {name: alpha * policy[name] + (1 - alpha) * weight for name, weight in reference.items()}
