"""The corrected GRPO trainer: ``cured(trl.GRPOTrainer)`` with a name. Imports the stack."""

from __future__ import annotations

from typing import Any

import trl

from pytest_trlcompat.trainers.compose import cured

__all__ = ["GRPOTrainer"]

_Cured: Any = cured(trl.GRPOTrainer)


class GRPOTrainer(_Cured):
    """``trl.GRPOTrainer`` of whichever release is installed, with known bugs cured.

    Takes what ``trl.GRPOTrainer`` takes, is one, and behaves like it elsewhere. What is cured, where and by which of
    its bases: the page of cures; what that comes to on the installed stack: ``GRPOTrainer.cures``.
    """
