"""Cure of ``ppo-newer-trainer``: PPOv2 (trl 0.9.6 to 0.11) beside a ``Trainer`` that has moved on.

From Transformers 4.47.0 on ``Trainer.create_optimizer`` reads ``self.optimizer_cls_and_kwargs``, which its constructor
sets and PPOv2's, which does not call it, does not; and ``_save_checkpoint`` takes no ``metrics``, which PPOv2 passes.

Imports nothing of the stack.
"""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["PPONewerTrainerMixin"]


class PPONewerTrainerMixin:
    """Lets a subclass of TRL's PPOv2 trainer make its optimizer, and save checkpoints while it trains.

    It knows by the parameters of ``_save_checkpoint``. From trl 0.12.0 on TRL sets the attribute on each trainer, which
    then hides this one, and passes what ``Trainer`` takes.
    """

    optimizer_cls_and_kwargs: Any = None

    def _save_checkpoint(self, model: Any, trial: Any, *metrics: Any, **more: Any) -> Any:
        upstream: Any = super()
        if "metrics" not in inspect.signature(upstream._save_checkpoint).parameters:
            more.pop("metrics", None)
        return upstream._save_checkpoint(model, trial, *metrics, **more)
