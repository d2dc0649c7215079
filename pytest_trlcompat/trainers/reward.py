"""The corrected trainer of reward models: ``cured(trl.RewardTrainer)`` with a name. Imports the stack."""

from __future__ import annotations

from typing import Any

import trl

from pytest_trlcompat.trainers.compose import cured

__all__ = ["RewardTrainer"]

_Cured: Any = cured(trl.RewardTrainer)


class RewardTrainer(_Cured):
    """``trl.RewardTrainer`` of whichever release is installed, with the cures that any trainer gets.

    Takes what ``trl.RewardTrainer`` takes, is one, and behaves like it elsewhere. What is cured: the page of cures;
    what that comes to on the installed stack: ``RewardTrainer.cures``.
    """
