"""Cure of ``grpo-warnings-issued``: a dictionary for the warning that GRPO silences.

TRL's constructor may write ``model.warnings_issued["estimate_tokens"] = True``, so that ``Trainer`` does not warn that
it cannot count tokens. Transformers took that warning, and the dictionary, away: ``object has no attribute
'warnings_issued'``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.upstream import class_uses, function_uses

__all__ = ["WarningsIssuedMixin"]

_NAME = "warnings_issued"
_LOCK = threading.Lock()


class WarningsIssuedMixin(Cure):
    """Lends models the dictionary while a subclass of ``trl.GRPOTrainer`` is built.

    Models that have one of their own keep it, also beside the lent one. What is written to the lent one is forgotten,
    since nothing reads it any more.
    """

    _kinds: ClassVar = {
        "grpo": ("OneDevicePerRankMixin", "its __init__ calls this one's"),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _lent():
            super().__init__(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        from transformers import PreTrainedModel

        if not class_uses(trainer_class, _NAME, but=("transformers.",)):
            return Activity(False, "TRL does not ask for it")
        if function_uses(PreTrainedModel.__init__, _NAME):
            return Activity(False, "models of Transformers have the dictionary")
        return Activity(True, "models of Transformers have no dictionary of warnings any more")


class _Lent:
    """An attribute of models in contexts that lend it; others find that there is none, as without it.

    One that a model has of its own goes first, since this is no data descriptor.
    """

    def __init__(self) -> None:
        self.current: ContextVar[dict[str, bool] | None] = ContextVar(_NAME, default=None)

    def __get__(self, model: Any, model_class: type) -> dict[str, bool]:
        issued = self.current.get()
        if issued is None:
            raise AttributeError(f"{model_class.__name__!r} object has no attribute {_NAME!r}", name=_NAME, obj=model)
        return issued


@contextmanager
def _lent() -> Iterator[None]:
    """Lend models a dictionary, on their class, since TRL loads the models itself where it is given their names."""
    from transformers import PreTrainedModel

    with _LOCK:
        if _NAME not in vars(PreTrainedModel):
            setattr(PreTrainedModel, _NAME, _Lent())
    lent = vars(PreTrainedModel).get(_NAME)
    if not isinstance(lent, _Lent):
        yield
        return
    token = lent.current.set({})
    try:
        yield
    finally:
        lent.current.reset(token)
