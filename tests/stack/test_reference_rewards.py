"""The reference's rewards and advantages, by numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pytest_trlcompat import reference

NAN = float("nan")


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_totals_are_weighted_sums_of_the_rewards_that_were_given() -> None:
    rewards = torch.tensor([[1.0, 2.0], [NAN, 4.0], [3.0, NAN], [NAN, NAN]])
    # 1 + 2/2; 4/2; 3; nothing
    assert reference.total_rewards(rewards, [1.0, 0.5]).tolist() == [2.0, 2.0, 3.0, 0.0]
    assert reference.total_rewards(rewards).tolist() == [3.0, 4.0, 3.0, 0.0]
    with pytest.raises(ValueError, match="1 reward weights for 2 reward functions"):
        reference.total_rewards(rewards, [1.0])


# Totals 2, 2 | 3, 0: means 2 and 1.5. Deviations from the mean of all, 1.75: 0.25, 0.25, 1.25, -1.75.
STD_1, BATCH_1 = math.sqrt(2 * 1.5**2 / 1), math.sqrt(4.75 / 3)
STD_0, BATCH_0 = 1.5, math.sqrt(4.75 / 4)


@pytest.mark.parametrize(
    "scale, correction, divisor",
    [
        ("group", 1, STD_1),
        ("group", 0, STD_0),
        (True, 1, STD_1),
        ("batch", 1, BATCH_1),
        ("batch", 0, BATCH_0),
        ("none", 1, 1.0),
        (False, 1, 1.0),
    ],
)
def test_advantages_in_each_way_of_scaling(scale: str | bool, correction: int, divisor: float) -> None:
    found = reference.advantages_of(
        column(2, 2, 3, 0), 2, scale_rewards=scale, std_correction=correction, std_epsilon=0.25
    )
    epsilon = 0.0 if scale in ("none", False) else 0.25
    expected = [0.0, 0.0, 1.5 / (divisor + epsilon), -1.5 / (divisor + epsilon)]
    assert found.advantages.tolist() == pytest.approx(expected, abs=1e-12)
    assert found.totals.tolist() == [2, 2, 3, 0]
    assert found.group_means.tolist() == [2, 2, 1.5, 1.5]
    stds = [0, 0, STD_1, STD_1] if correction else [0, 0, STD_0, STD_0]
    assert found.group_stds.tolist() == pytest.approx(stds)
    assert float(found.batch_std) == pytest.approx(BATCH_1 if correction else BATCH_0)


def test_each_function_is_normalised_before_the_sum() -> None:
    rewards = torch.tensor([[1, 0], [0, 0], [2, 4], [2, 0]], dtype=torch.float64)
    found = reference.advantages_of(
        rewards, 2, weights=[1, 2], aggregation="normalize_then_sum", std_correction=0, std_epsilon=0.5
    )
    # First function: (1 - 0.5) / (0.5 + 0.5) = 0.5, -0.5, 0, 0; second: 0, 0, (4 - 2) / (2 + 0.5) = 0.8, -0.8.
    sums = [0.5, -0.5, 1.6, -1.6]  # mean 0, squares 0.25 + 0.25 + 2.56 + 2.56 = 5.62
    divisor = math.sqrt(5.62 / 4) + 0.5
    assert found.advantages.tolist() == pytest.approx([each / divisor for each in sums])


def test_a_missing_reward_is_left_out_of_its_functions_normalisation() -> None:
    rewards = torch.tensor([[1, NAN], [3, 5], [2, NAN]], dtype=torch.float64)
    found = reference.advantages_of(rewards, 3, aggregation="normalize_then_sum", std_correction=0, std_epsilon=0.0)
    # The second function's only reward has no deviation, 0 / 0, and counts nothing; the first: -1, 1, 0 over
    # sqrt(2 / 3), over their standard deviation 1.
    expected = [-math.sqrt(1.5), math.sqrt(1.5), 0.0]
    assert found.advantages.tolist() == pytest.approx(expected)


def test_equal_rewards_have_no_advantage() -> None:
    for scale in ("group", "batch", "none"):
        found = reference.advantages_of(column(3, 3, 3, 3), 2, scale_rewards=scale)
        assert found.advantages.tolist() == [0, 0, 0, 0]
        assert found.group_stds.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_shift_of_all_rewards_changes_nothing(scale: str, aggregation: str) -> None:
    rewards = torch.tensor([[1, 2], [3, 5], [4, 4], [0, 7]], dtype=torch.float64)
    first, second = (
        reference.advantages_of(each, 2, scale_rewards=scale, aggregation=aggregation).advantages
        for each in (rewards, rewards + 100.0)
    )
    assert first.tolist() == pytest.approx(second.tolist(), abs=1e-12)
    assert first.abs().max() > 0.5


def test_groups_do_not_mix_but_for_the_batch() -> None:
    first, second = column(1, 2, 0, 0), column(1, 2, 0, 9)
    for scale, is_same in (("group", True), ("none", True), ("batch", False)):
        one, other = (reference.advantages_of(each, 2, scale_rewards=scale).advantages[:2] for each in (first, second))
        assert torch.equal(one, other) == is_same


def test_what_is_not_documented_is_refused() -> None:
    with pytest.raises(ValueError, match="3 completions are no whole groups of 2"):
        reference.advantages_of(column(1, 2, 3), 2)
    with pytest.raises(ValueError, match="scale_rewards='rank' is not documented"):
        reference.advantages_of(column(1, 2), 2, scale_rewards="rank")
    with pytest.raises(ValueError, match="multi_objective_aggregation='max' is not documented"):
        reference.advantages_of(column(1, 2), 2, aggregation="max")
