"""The corrected distillation trainer: ``cured(trl.DistillationTrainer)`` with a name. Imports the stack."""

from __future__ import annotations

from typing import Any

import trl

from pytest_trlcompat.trainers.compose import cured

__all__ = ["DistillationTrainer"]

_Cured: Any = cured(trl.DistillationTrainer)


class DistillationTrainer(_Cured):
    """``trl.DistillationTrainer`` of whichever release is installed, with the cures that any trainer gets.

    Takes what ``trl.DistillationTrainer`` takes, is one, and behaves like it elsewhere. What is cured:
    the page of cures; what that comes to on the installed stack: ``DistillationTrainer.cures``.
    """
