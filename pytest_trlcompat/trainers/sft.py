"""The corrected SFT trainer: ``cured(trl.SFTTrainer)`` with a name. Imports the stack."""

from __future__ import annotations

from typing import Any

import trl

from pytest_trlcompat.trainers.compose import cured

__all__ = ["SFTTrainer"]

_Cured: Any = cured(trl.SFTTrainer)


class SFTTrainer(_Cured):
    """``trl.SFTTrainer`` of whichever release is installed, with the cures that any trainer gets.

    Takes what ``trl.SFTTrainer`` takes, is one, and behaves like it elsewhere. What is cured: the page of cures;
    what that comes to on the installed stack: ``SFTTrainer.cures``.
    """
