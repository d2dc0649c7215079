"""The corrected DPO trainer: ``cured(trl.DPOTrainer)`` with a name. Imports the stack."""

from __future__ import annotations

from typing import Any

import trl

from pytest_trlcompat.trainers.compose import cured

__all__ = ["DPOTrainer"]

_Cured: Any = cured(trl.DPOTrainer)


class DPOTrainer(_Cured):
    """``trl.DPOTrainer`` of whichever release is installed, with the cures that any trainer gets.

    Takes what ``trl.DPOTrainer`` takes, is one, and behaves like it elsewhere. What is cured: the page of cures;
    what that comes to on the installed stack: ``DPOTrainer.cures``.
    """
