"""Cure of ``sft-shifted-count``: tokens that are predicted are counted, whatever a model's class is called.

Transformers' ``Trainer`` divides the loss of a step by the number of its labels, and leaves out the first one of each
row, which nothing predicts, where the model's ``loss_type`` says that its loss shifts labels. It is read from the name
of the class. ``GPT2LMHeadModel`` and some others have a name from which none is read; their loss, which is the
default one, shifts labels all the same, and is divided by one too many for each row.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["ShiftedCountMixin"]

_FLAG = "_loss_shifts_labels"


class ShiftedCountMixin(Cure):
    """Tells Transformers that the loss of a decoder shifts labels, where the model's own loss function does.

    The function is asked for, not the name of the class. Encoder-decoders are left as they are.
    """

    # GRPO counts no labels.
    _kinds: ClassVar = {
        "trainer": ("LogStartTimeMixin", "neither calls the other; it was measured here"),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._was_counted_whole = getattr(self, _FLAG, None) is False and _shifts_labels(vars(self)["model"])
        if self._was_counted_whole:
            setattr(self, _FLAG, True)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        from transformers import Trainer

        if _FLAG not in Trainer.__init__.__code__.co_names:
            return Activity(False, "Transformers counts the labels of all models alike")
        if trainer is None:
            return Activity(
                None, "depends on the model: its loss shifts labels, and the name of its class may not say so"
            )
        if trainer._was_counted_whole:
            return Activity(True, "the model's loss shifts labels, and the name of its class does not say so")
        return Activity(False, "Transformers knows whether the model's loss shifts labels")


def _shifts_labels(model: Any) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    return not getattr(config, "is_encoder_decoder", False) and getattr(base, "loss_function", None) is ForCausalLMLoss
