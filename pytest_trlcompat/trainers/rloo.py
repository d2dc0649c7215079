"""The corrected RLOO trainer: ``cured(trl.RLOOTrainer)`` with a name. Imports the stack."""

from __future__ import annotations

from typing import Any

from trl.trainer.rloo_trainer import RLOOTrainer as UpstreamTrainer

from pytest_trlcompat.trainers.compose import cured

__all__ = ["RLOOTrainer"]

_Cured: Any = cured(UpstreamTrainer)


class RLOOTrainer(_Cured):
    """``trl.RLOOTrainer`` of whichever release is installed, with the cures that any trainer gets.

    Where its training loop is PPO's, in older releases, also with cures of that. Takes what ``trl.RLOOTrainer`` takes,
    is one, and behaves like it elsewhere. What is cured: the page of cures; what that comes to on the installed stack:
    ``RLOOTrainer.cures``.
    """
