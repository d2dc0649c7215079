"""Cure of ``ppo-newer-trainer`` and ``first-rloo-newer-trainer``: PPOv2, and the first RLOO, beside a ``Trainer`` that
has moved on.

``Trainer.create_optimizer`` reads ``self.optimizer_cls_and_kwargs``, which its constructor sets and theirs, which do
not call it, do not; and ``_save_checkpoint`` takes no ``metrics`` any more, which they pass. They may also keep no
entry in their state for what callbacks save, which ends a checkpoint in ``KeyError: 'TrainerControl'``. The cure has
the attribute, drops the argument and adds the entry.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.upstream import method_uses

__all__ = ["PPONewerTrainerMixin"]


class PPONewerTrainerMixin(Cure):
    """Lets a subclass of TRL's PPOv2 trainer, or of its first RLOO trainer, make its optimizer, and save checkpoints
    while it trains.

    It knows by the parameters of ``_save_checkpoint``. A newer TRL sets the attribute on each trainer, which then hides
    this one, and passes what ``Trainer`` takes.
    """

    _kinds: ClassVar = {
        "ppo": ("PPOAcceleratorMixin", "neither calls the other; cures of one topic stand together"),
        "first_rloo": ("PPOEosCountMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.SAVE_CHECKPOINT,)
    optimizer_cls_and_kwargs: Any = None
    callback_handler: Any
    control: Any
    state: Any

    def _save_checkpoint(self, model: Any, trial: Any, *metrics: Any, **more: Any) -> Any:
        upstream: Any = super()
        self._add_entries_of_callbacks()
        if "metrics" not in inspect.signature(upstream._save_checkpoint).parameters:
            more.pop("metrics", None)
        return upstream._save_checkpoint(model, trial, *metrics, **more)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        for name in ("optimizer_cls_and_kwargs", "stateful_callbacks"):
            if _asked_for(name) and not method_uses(trainer_class, "__init__", name):
                return Activity(True, f"Trainer asks for {name}, which TRL's constructor does not set")
        return Activity(False, "TRL's constructor sets what Trainer asks for, and passes what it takes")

    def _add_entries_of_callbacks(self) -> None:
        """As ``Trainer``'s constructor does; a callback that has its entry already keeps it."""
        entries = getattr(self.state, "stateful_callbacks", None)
        # Transformers before 4.43 has none, and saves nothing of callbacks.
        if entries is not None:
            for callback in (*self.callback_handler.callbacks, self.control):
                if callable(getattr(callback, "state", None)):
                    entries.setdefault(type(callback).__name__, callback.state())


def _asked_for(name: str) -> bool:
    """Whether ``Trainer`` reads an attribute when it makes an optimizer, or fills it in its constructor."""
    from transformers import Trainer

    return method_uses(Trainer, "create_optimizer", name) or method_uses(Trainer, "__init__", name)
