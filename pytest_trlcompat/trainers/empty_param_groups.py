"""Cure of ``deepspeed-empty-param-group`` (transformers 43692): a learning rate for each group that DeepSpeed keeps.

Transformers puts parameters with and without weight decay into two groups. Where nothing is trained without decay, as
with most adapters, one is empty; DeepSpeed drops it, the scheduler still counts it, and a torch that zips strictly ends
the first step with ``zip() argument 2 is longer than argument 1``. Needless from Transformers 5.1.0 on, which makes the
scheduler afterwards.

Imports nothing of the stack.
"""

from __future__ import annotations

from typing import Any

__all__ = ["EmptyParamGroupsMixin"]


class EmptyParamGroupsMixin:
    """Drops empty groups from the optimizer of a subclass of ``transformers.Trainer``, before DeepSpeed does.

    Only under DeepSpeed: elsewhere an empty group does no harm, and a checkpoint's optimizer has it.
    """

    is_deepspeed_enabled: bool
    optimizer: Any

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        created = upstream.create_optimizer(*args, **kwargs)
        groups = getattr(self.optimizer, "param_groups", None)
        if self.is_deepspeed_enabled and groups is not None:
            groups[:] = [group for group in groups if group["params"]]
        return created
