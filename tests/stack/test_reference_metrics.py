"""What the reference logs, by numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_trlcompat import reference
from pytest_trlcompat.reference import Generation, GRPOSettings, MicroBatch, Undecided

GROUPS = [[1.0, 4.0], [3.0, float("nan")], [2.0, 0.0], [2.0, 0.0]]
"""Totals 5, 3 | 2, 2."""


def generation(completions: list[list[int]], rewards: list[list[float]]) -> Generation:
    tokens = reference.tokens_of([[5]] * len(completions), completions, pad_token_id=0, eos_token_id=1)
    advantages = reference.advantages_of(torch.tensor(rewards, dtype=torch.float64), 2)
    return Generation(tokens, advantages, torch.zeros(tokens.completion_ids.shape), None)


FOUR = generation([[8, 1], [8, 8, 8], [1], [8, 8, 1]], GROUPS)


def test_completions() -> None:
    found = reference.generation_metrics(FOUR, ["first", "second"], GRPOSettings(num_generations=2))
    lengths = {name.removeprefix("completions/"): value for name, value in found.items() if "completions/" in name}
    assert lengths == pytest.approx(
        {
            "mean_length": 9 / 4,
            "min_length": 1,
            "max_length": 3,
            "mean_terminated_length": 6 / 3,
            "min_terminated_length": 1,
            "max_terminated_length": 3,
            "clipped_ratio": 1 / 4,
        }
    )


def test_rewards() -> None:
    found = reference.generation_metrics(FOUR, ["first", "second"], GRPOSettings(num_generations=2))
    rewards = {name: value for name, value in found.items() if "completions/" not in name}
    assert rewards == pytest.approx(
        {
            "rewards/first/mean": 2,
            "rewards/first/std": math.sqrt((1 + 1) / 3),
            "rewards/second/mean": 4 / 3,  # over three
            "rewards/second/std": math.sqrt(((4 - 4 / 3) ** 2 + 2 * (4 / 3) ** 2) / 2),
            "reward": 3,
            "reward_std": math.sqrt((4 + 0 + 1 + 1) / 3),
            "frac_reward_zero_std": 0.5,
        }
    )
    groups = reference.generation_metrics(
        FOUR, ["first", "second"], GRPOSettings(num_generations=2, reward_std_over="groups")
    )
    assert groups["reward_std"] == pytest.approx((math.sqrt(2) + 0) / 2)
    for scaled, of in (("group", groups), ("batch", found)):
        settings = GRPOSettings(num_generations=2, reward_std_over="as_scaled", scale_rewards=scaled)
        either = reference.generation_metrics(FOUR, ["first", "second"], settings)
        assert either["reward_std"] == of["reward_std"]


def test_no_completion_that_terminates() -> None:
    none = generation([[8], [8]], [[0.0], [1.0]])
    for value in (0.0, -1.0):
        settings = GRPOSettings(num_generations=2, undecided=Undecided(no_terminated_length=value))
        found = reference.generation_metrics(none, ["only"], settings)
        assert found["completions/mean_terminated_length"] == found["completions/max_terminated_length"] == value
        assert found["completions/clipped_ratio"] == 1


def test_a_lone_completion_has_no_spread_or_one_of_zero() -> None:
    lone = generation([[8], [8]], [[0.0], [1.0]])
    for value in (False, True):
        settings = GRPOSettings(
            num_generations=2, num_generations_eval=1, undecided=Undecided(lone_completion_has_zero_std=value)
        )
        found = reference.generation_metrics(lone, ["only"], settings, evaluation=True)
        assert found["frac_reward_zero_std"] == float(value)


def test_the_deviation_of_one_reward_is_zero_or_left_out_of_the_mean_over_generations() -> None:
    several, one = (generation([[8], [8]], rewards) for rewards in ([[0.0], [1.0]], [[float("nan")], [1.0]]))
    for logged, expected in ((True, math.sqrt(0.5) / 2), (False, math.sqrt(0.5))):
        settings = GRPOSettings(num_generations=2, undecided=Undecided(lone_reward_std_logged=logged))
        found = [reference.generation_metrics(each, ["only"], settings) for each in (several, one)]
        assert ("rewards/only/std" in found[1]) == logged
        assert reference.average_logs(found)["rewards/only/std"] == pytest.approx(expected)
        assert found[1]["rewards/only/mean"] == 1.0


def micro_batch(rows: tuple[int, ...], mask: list[list[int]], weights: list[list[float]], **values: Any) -> MicroBatch:
    given = torch.tensor(mask).bool()
    zeros = torch.zeros(given.shape, dtype=torch.float64)
    fields: dict[str, Any] = {
        "generation": 0,
        "rank": 0,
        "rows": rows,
        "mask": given,
        "weights": torch.tensor(weights, dtype=torch.float64),
        "kl": None,
        **dict.fromkeys(
            ("logprobs", "entropies", "high_entropy_mask", "policy_mask", "policy_losses", "shares", "loss"), zeros
        ),
    }
    return MicroBatch(**{**fields, **values})


def doubles(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# The first completion has a positive advantage, the second a negative one. 9 stands where nothing counts.
TWO = (
    micro_batch((0,), [[1, 1, 0]], [[1.5, 0.5, 9.0]], entropies=doubles([1, 3, 9]), kl=doubles([1, 1, 9])),
    micro_batch((1,), [[1, 1, 1]], [[0.5, 0.6, 1.5]], entropies=doubles([5, 5, 8]), kl=doubles([2, 2, 2])),
)


def metrics_of(**settings: Any) -> dict[str, float]:
    return reference.training_metrics(TWO, [FOUR], GRPOSettings(**settings))


def test_averages_are_over_tokens_of_all_micro_batches_and_ranks() -> None:
    found = metrics_of()
    assert found["entropy"] == pytest.approx((1 + 3 + 5 + 5 + 8) / 5)
    assert found["kl"] == pytest.approx((1 + 1 + 2 + 2 + 2) / 5)
    means = metrics_of(undecided=Undecided(metrics_mean="micro_batches"))
    assert means["entropy"] == pytest.approx((2 + 6) / 2)
    assert means["kl"] == pytest.approx((1 + 2) / 2)
    # By completion, the part below: 0 and 2/3; above: 1/2 and 0. On two ranks, the two are one micro-batch.
    assert means["clip_ratio/low_mean"] == means["clip_ratio/low_min"] == pytest.approx(1 / 3)
    assert means["clip_ratio/high_max"] == pytest.approx(1 / 4)
    one = metrics_of(world_size=2, undecided=Undecided(metrics_mean="micro_batches"))
    assert (one["clip_ratio/low_min"], one["clip_ratio/high_max"]) == (0, 0.5)
    assert one["entropy"] == pytest.approx(found["entropy"])
    assert one["clip_ratio/low_mean"] == pytest.approx(2 / 5)
    ranks = metrics_of(world_size=2, undecided=Undecided(metrics_mean="ranks"))
    assert (ranks["clip_ratio/low_min"], ranks["clip_ratio/high_max"]) == (0, 0.5)
    assert ranks["entropy"] == pytest.approx((2 + 6) / 2)
    assert ranks["clip_ratio/low_mean"] == pytest.approx(1 / 3)
    weighted = metrics_of(undecided=Undecided(kl_logged_with_weights=True))
    assert weighted["kl"] == pytest.approx((1.5 + 0.5 + 1 + 1.2 + 3) / 5)
    plain = metrics_of(use_bias_correction_kl=False, undecided=Undecided(kl_logged_with_weights=True))
    assert plain["kl"] == found["kl"]
    by_completion = metrics_of(undecided=Undecided(kl_logged_over="completions"))
    assert by_completion["kl"] == pytest.approx((1 + 2) / 2)


def test_clip_ratios_of_tokens() -> None:
    # Clipped: 1.5 of the good completion above; 0.5 and 0.6 of the bad one below.
    found = {name.removeprefix("clip_ratio/"): value for name, value in metrics_of().items() if "clip_" in name}
    assert found == pytest.approx(
        {"low_mean": 2 / 5, "low_min": 0, "high_mean": 1 / 5, "high_max": 1 / 2, "region_mean": 3 / 5}
    )
    bounds = metrics_of(undecided=Undecided(clipped_by_sign=False))
    assert bounds["clip_ratio/low_mean"] == pytest.approx(3 / 5)
    assert bounds["clip_ratio/low_min"] == pytest.approx(1 / 2)
    assert bounds["clip_ratio/high_max"] == pytest.approx(1 / 2)
    wide = metrics_of(epsilon=0.45, epsilon_high=0.6)
    assert wide["clip_ratio/region_mean"] == pytest.approx(1 / 5)  # 0.5 alone


def test_clip_ratios_of_completions() -> None:
    same = [
        micro_batch((0,), [[1, 1, 0]], [[1.5] * 3]),
        micro_batch((1,), [[1, 1, 1]], [[1.5] * 3]),
        micro_batch((1,), [[0, 0, 0]], [[0.5] * 3]),  # excluded: it counts nowhere
    ]
    settings = GRPOSettings(importance_sampling_level="sequence")
    found = reference.training_metrics(same, [FOUR], settings)
    assert found["clip_ratio/high_mean"] == pytest.approx(1 / 2)
    assert found["clip_ratio/high_max"] == 1
    assert found["clip_ratio/low_min"] == 0
    assert "kl" not in found


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_losses_without_hard_clipping_have_no_clip_ratio(loss_type: str) -> None:
    assert set(metrics_of(loss_type=loss_type)) == {"entropy", "kl"}


def test_several_steps_are_averaged_but_for_what_is_of_a_moment() -> None:
    first = {"loss": 1.0, "num_tokens": 10.0, "learning_rate": 3.0, "reward": 4.0}
    second = {"loss": 2.0, "num_tokens": 20.0, "learning_rate": 2.0}
    assert reference.average_logs([first, second]) == {
        "loss": 1.5,
        "num_tokens": 20.0,
        "learning_rate": 2.0,
        "reward": 4.0,
    }


def test_tokens_may_count_each_iteration() -> None:
    model = torch.nn.Embedding(9, 9)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.inner(input_ids)

    rollout = reference.Rollout([[5]] * 2, [[8, 1], [8]], [[0.0], [1.0]])
    for each, expected in ((False, [5.0, 5.0]), (True, [5.0, 10.0])):
        settings = GRPOSettings(
            num_generations=2, num_iterations=2, undecided=Undecided(num_tokens_each_iteration=each)
        )
        steps = reference.grpo_train(Model(), [rollout], settings)
        assert [step.logs["num_tokens"] for step in steps] == expected


@pytest.mark.parametrize(
    ("rewards", "part"),
    [
        ([19 / 11] * 3, 1.0),
        ([19 / 11, 19 / 11, 2.0], 0.0),
        ([19 / 11, 19 / 11, math.nan], 1.0),
        ([1.0, math.nan, math.nan], 0.0),
    ],
)
def test_equal_rewards_have_no_spread_whatever_their_mean_is_rounded_to(rewards: list[float], part: float) -> None:
    values = torch.tensor(rewards)  # float32: the mean of three times 19/11 is another number
    assert reference.metrics.part_without_spread(values, 3, GRPOSettings(num_generations=3)) == part
