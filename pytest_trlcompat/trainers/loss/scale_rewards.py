"""Cure of ``grpo-scale-rewards``: advantages divided by the deviation that ``scale_rewards`` names.

GRPO divides its advantages by the deviation of their group, of the batch, or by none. Some releases mix up these names:
``group``, the default, divides by none, and ``none`` and ``batch`` divide by that of the group. The cure gives the
trainer the name by which such a release does what was meant. By the deviation of the batch it cannot divide.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError, leaving_out
from pytest_trlcompat.trainers.curing.upstream import codes_of, definitions

__all__ = ["ScaleRewardsMixin"]

_MIXED_UP = ("batch", "none")
"""Of these TRL takes the group's deviation, and divides by it; in other releases of ``("group", "none")``."""
_NAMED = {"group": "batch", "none": "group"}


class ScaleRewardsMixin(Cure):
    """Names the deviation that a subclass of ``trl.GRPOTrainer`` divides by so that these releases understand it.

    With ``scale_rewards="none"`` the logged ``reward_std`` is that of the batch, not the mean of the groups'.

    Raises:
        CureError: ``scale_rewards="batch"``, by which these releases cannot divide.
    """

    _kinds: ClassVar = {
        "grpo": ("EntropyBonusMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.GENERATE_AND_SCORE,)
    scale_rewards: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not _mixes_up(type(self)):
            return
        if self.scale_rewards not in _NAMED:
            raise CureError(
                "ScaleRewardsMixin",
                expected="a division of the advantages by the deviation of the batch",
                seen=f"with scale_rewards={self.scale_rewards!r} this release divides by that of the group",
                packages=("trl",),
                remedy=f'Take trl >=0.22.2, or scale_rewards="group"{leaving_out("ScaleRewardsMixin")}',
            )
        self.scale_rewards = _NAMED[self.scale_rewards]

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if _mixes_up(trainer_class):
            return Activity(True, "TRL divides by the group's deviation where it must not, and not where it must")
        return Activity(False, "TRL divides advantages as scale_rewards says")


def _mixes_up(cls: type) -> bool:
    """Whether TRL compares ``scale_rewards`` with the wrong names where it takes the group's deviation."""
    return any(
        # The comparison `self.scale_rewards in (...)` keeps its tuple among the code's constants.
        _MIXED_UP in code.co_consts
        for package, defined, _ in definitions(cls, "_generate_and_score_completions")
        if package == "trl"
        for code in codes_of(defined)
    )
