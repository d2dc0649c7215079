"""Cure of ``grpo-warnings-issued``: a place for the warning that GRPO wants to keep quiet.

Up to 0.26.2 TRL's constructor writes ``model.warnings_issued["estimate_tokens"] = True``, so that ``Trainer`` does not
warn that it cannot count tokens. Transformers 5.1.0 took that warning, and the dictionary, away: ``object has no
attribute 'warnings_issued'``.

Imports Transformers when a trainer is built, and nothing of this package.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

__all__ = ["WarningsIssuedMixin"]


class WarningsIssuedMixin:
    """Lends models the dictionary while a subclass of ``trl.GRPOTrainer`` is built.

    It knows by looking for the attribute: with Transformers before 5.1.0 each model has one of its own, also beside
    the lent one. Needless from trl 0.27.0 on. What is written to it is forgotten, since nothing reads it any more.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from transformers import PreTrainedModel

        # On the class, since TRL loads the models itself where it is given their names.
        with mock.patch.object(PreTrainedModel, "warnings_issued", {}, create=True):
            super().__init__(*args, **kwargs)
