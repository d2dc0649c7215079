"""Cure of ``grpo-warnings-issued``: a dictionary for the warning that GRPO silences.

TRL's constructor may write ``model.warnings_issued["estimate_tokens"] = True``, so that ``Trainer`` does not warn that
it cannot count tokens. Transformers took that warning, and the dictionary, away: ``object has no attribute
'warnings_issued'``.

Imports Transformers when a trainer is built, and of this package ``_cure`` and ``_upstream``.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from pytest_trlcompat.trainers._cure import Activity, Cure
from pytest_trlcompat.trainers._upstream import class_uses, function_uses

__all__ = ["WarningsIssuedMixin"]

_NAME = "warnings_issued"


class WarningsIssuedMixin(Cure):
    """Lends models the dictionary while a subclass of ``trl.GRPOTrainer`` is built.

    Models that have one of their own keep it, also beside the lent one. What is written to the lent one is forgotten,
    since nothing reads it any more.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from transformers import PreTrainedModel

        # On the class, since TRL loads the models itself where it is given their names.
        with mock.patch.object(PreTrainedModel, _NAME, {}, create=True):
            super().__init__(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        from transformers import PreTrainedModel

        if not class_uses(trainer_class, _NAME, but=("transformers.",)):
            return Activity(False, "TRL does not ask for it")
        if function_uses(PreTrainedModel.__init__, _NAME):
            return Activity(False, "models of Transformers have the dictionary")
        return Activity(True, "models of Transformers have no dictionary of warnings any more")
