"""The corrected KTO trainer: ``cured(trl.KTOTrainer)`` with a name. Imports the stack."""

from __future__ import annotations

from typing import Any

import trl

from pytest_trlcompat.trainers.compose import cured

__all__ = ["KTOTrainer"]

_Cured: Any = cured(trl.KTOTrainer)


class KTOTrainer(_Cured):
    """``trl.KTOTrainer`` of whichever release is installed, with the cures that any trainer gets.

    Takes what ``trl.KTOTrainer`` takes, is one, and behaves like it elsewhere. What is cured: the page of cures;
    what that comes to on the installed stack: ``KTOTrainer.cures``.
    """
