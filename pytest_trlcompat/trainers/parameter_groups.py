"""Cure of ``ppo-lr-scheduler-zip`` (transformers 43692): no optimizer group that DeepSpeed would take out again.

``transformers.Trainer`` splits parameters into those with and those without weight decay. Until Transformers 4.48 the
latter are biases and registered layer norms, of which a Mistral has none (a Qwen2 has biases, a Llama registers its
norm). PPO makes its learning rate scheduler for both groups; DeepSpeed then removes the empty one, and where PyTorch
zips strictly (from 2.10 on) the scheduler's first step ends in ``zip() argument 2 is longer than argument 1``.

Imports nothing of the stack, and nothing of this package.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NoEmptyParameterGroupsMixin", "drop_empty_parameter_groups"]


def drop_empty_parameter_groups(optimizer: Any) -> None:
    """Take groups without parameters out of ``optimizer``: what it updates stays the same."""
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


class NoEmptyParameterGroupsMixin:
    """Makes the optimizer of a ``transformers.Trainer`` without groups that hold no parameters.

    It matters where a scheduler is made for it before DeepSpeed takes it over, as TRL's PPO trainers do. An optimizer
    that was passed to the trainer is left alone. Needless where no group is empty (from Transformers 4.49 on,
    where names count), and does nothing there.
    """

    optimizer: Any

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        passed = self.optimizer is not None
        upstream: Any = super()
        optimizer = upstream.create_optimizer(*args, **kwargs)
        if not passed:
            drop_empty_parameter_groups(optimizer)
        return optimizer
