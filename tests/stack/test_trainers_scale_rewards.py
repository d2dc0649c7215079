"""The cure of ``grpo-scale-rewards``: what it calls the deviation, when it keeps still, and what it refuses."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

import pytest

pytest.importorskip("torch")

from pytest_trlcompat.trainers import CureError
from pytest_trlcompat.trainers.loss.scale_rewards import ScaleRewardsMixin

REWARDS = [1.0, 3.0, 10.0, 20.0]


class Trl0222:
    """The part of trl 0.22.2 that matters."""

    __module__ = "trl.trainer.grpo_trainer"

    def __init__(self, scale_rewards: str) -> None:
        self.scale_rewards = scale_rewards

    def _generate_and_score_completions(self, rewards: list[float]) -> list[float]:
        groups = [rewards[:2], rewards[2:]]
        if self.scale_rewards in ["group", "none"]:
            deviations = [stdev(group) for group in groups]
        else:
            deviations = [stdev(rewards)] * 2
        parts = [1.0 if self.scale_rewards == "none" else deviation for deviation in deviations]
        return [(reward - mean(group)) / part for group, part in zip(groups, parts, strict=True) for reward in group]


class Trl0221(Trl0222):
    """That of trl 0.22.1, which compares with other names."""

    __module__ = "trl.trainer.grpo_trainer"

    def _generate_and_score_completions(self, rewards: list[float]) -> list[float]:
        groups = [rewards[:2], rewards[2:]]
        deviations = [1.0, 1.0]
        if self.scale_rewards in ["batch", "none"]:
            deviations = [stdev(group) for group in groups]
        return [
            (reward - mean(group)) / part for group, part in zip(groups, deviations, strict=True) for reward in group
        ]


def corrected(kind: type, scale: str) -> Any:
    return type("Corrected", (ScaleRewardsMixin, kind), {})(scale)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_these_releases_divide_as_the_next_one_does(scale: str) -> None:
    right = Trl0222(scale)._generate_and_score_completions(REWARDS)
    assert Trl0221(scale)._generate_and_score_completions(REWARDS) != pytest.approx(right)
    assert corrected(Trl0221, scale)._generate_and_score_completions(REWARDS) == pytest.approx(right)


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_it_changes_nothing_where_the_names_are_right(scale: str) -> None:
    assert corrected(Trl0222, scale).scale_rewards == scale
    assert ScaleRewardsMixin._activity(Trl0222, None).active is False


def test_it_is_seen_through_a_users_class() -> None:
    class Mine(Trl0221):
        __module__ = "mine"

        def _generate_and_score_completions(self, rewards: list[float]) -> list[float]:
            return super()._generate_and_score_completions(rewards)

    assert corrected(Mine, "group").scale_rewards == "batch"
    assert ScaleRewardsMixin._activity(Mine, None).active is True


def test_a_division_that_these_releases_cannot_do_is_refused() -> None:
    with pytest.raises(CureError, match=r"looked for a division .* with scale_rewards='batch' .*Take trl >=0\.22\.2"):
        corrected(Trl0221, "batch")
