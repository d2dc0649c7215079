"""Cure of ``ppo-newer-trainer``: PPOv2 (trl 0.9.6 to 0.11) beside a ``Trainer`` that has moved on.

From Transformers 4.47.0 on ``Trainer.create_optimizer`` reads ``self.optimizer_cls_and_kwargs``, which its constructor
sets and PPOv2's, which does not call it, does not; and ``_save_checkpoint`` takes no ``metrics``, which PPOv2 passes.
Up to 0.10 PPOv2 also keeps no place in its state for what callbacks save, which since Transformers 4.43 ends a
checkpoint in ``KeyError: 'TrainerControl'``.

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
    callback_handler: Any
    control: Any
    state: Any

    def _save_checkpoint(self, model: Any, trial: Any, *metrics: Any, **more: Any) -> Any:
        upstream: Any = super()
        self._make_room_for_callbacks()
        if "metrics" not in inspect.signature(upstream._save_checkpoint).parameters:
            more.pop("metrics", None)
        return upstream._save_checkpoint(model, trial, *metrics, **more)

    def _make_room_for_callbacks(self) -> None:
        """As ``Trainer``'s constructor does; a callback that has its place already keeps it."""
        places = getattr(self.state, "stateful_callbacks", None)
        if places is not None:  # Transformers before 4.43 saves nothing of callbacks
            for callback in (*self.callback_handler.callbacks, self.control):
                if callable(getattr(callback, "state", None)):
                    places.setdefault(type(callback).__name__, callback.state())
