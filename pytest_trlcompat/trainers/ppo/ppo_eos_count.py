"""Cure of ``ppo-eos-count`` and ``first-rloo-eos-count``: PPO, and the first RLOO, log the ends of sequence of all
ranks.

TRL's PPO trainer, and its first RLOO trainer, gather each number that they log, but ``val/num_eos_tokens``, which is
that of the first rank. The cure adds up the counts of all ranks, all of which log. It does not look whether upstream
gathers it: no release did until PPO was removed from TRL, and RLOO became another trainer.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import SEVERAL_RANKS, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["PPOEosCountMixin"]

_COUNT = "val/num_eos_tokens"


class PPOEosCountMixin(Cure):
    """Lets a subclass of TRL's PPO trainer, or of its first RLOO trainer, log ``val/num_eos_tokens`` of all ranks.

    Does nothing in one process.
    """

    _kinds: ClassVar = {
        "ppo": ("PPOGradNormMixin", "neither calls the other; cures of one topic stand together"),
        "first_rloo": ("PPOGradNormMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.trainer_method("log"),)
    _needed: ClassVar = (SEVERAL_RANKS,)
    accelerator: Any

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As ``Trainer.log``; collective where ``logs`` has the count, as upstream's gathering before it is."""
        upstream: Any = super()
        if _COUNT in logs and SEVERAL_RANKS.holds(self):
            count = torch.tensor(logs[_COUNT], device=self.accelerator.device)
            logs = {**logs, _COUNT: int(self.accelerator.reduce(count, "sum"))}
        upstream.log(logs, *args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "TRL does not gather val/num_eos_tokens", *cls._needed)
