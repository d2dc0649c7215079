"""Reward modelling by the reference: by hand on a model that can be worked out, and by what must hold for any model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_trlcompat import reference
from pytest_trlcompat.reference import RewardSettings, RewardUndecided

from .reference_models import Values, random_values


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def pair(chosen: list[int], rejected: list[int], margin: float | None = None) -> dict[str, Any]:
    beside = {} if margin is None else {"margin": (margin,)}
    return {"chosen_ids": tuple(chosen), "rejected_ids": tuple(rejected), **beside}


def worth() -> Values:
    """A sequence is worth 0, 1, 3 or -2, by its last token."""
    return Values(torch.tensor([0.0, 1.0, 3.0, -2.0], dtype=torch.float64))


def settings_of(**settings: Any) -> RewardSettings:
    return RewardSettings(**{"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": None, **settings})


ROWS = [pair([0, 1], [2, 0]), pair([3, 2], [1, 1, 3])]
"""Rewards 1 and 0, and 3 and -2."""


def test_a_step_by_hand() -> None:
    settings = settings_of()
    (step,) = reference.supervised_train(worth(), [[[ROWS]]], settings, reference.reward_objective(settings))
    losses = [-math.log(sigmoid(1)), -math.log(sigmoid(5))]
    assert step.loss == pytest.approx(sum(losses) / 2)
    # The derivative of -log sigmoid(d) with respect to d is -sigmoid(-d); each token has one of the four rewards.
    near, far = sigmoid(-1) / 2, sigmoid(-5) / 2
    assert step.gradients["table"].tolist() == pytest.approx([near, -near, -far, far])
    logs = reference.supervised_logs([step], settings)
    assert logs["accuracy"] == 1
    assert (logs["min_reward"], logs["mean_reward"], logs["max_reward"]) == (-2, 0.5, 3)
    assert logs["margin"] == 3
    assert logs["num_tokens"] == 2 + 2 + 2 + 3


def test_a_margin_and_centred_rewards_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0])
    plain = reference.preference_losses(chosen, rejected)
    assert plain.tolist() == pytest.approx([-math.log(sigmoid(1)), -math.log(sigmoid(-1))])
    apart = reference.preference_losses(chosen, rejected, margins=torch.tensor([0.5, -2.0]))
    assert apart.tolist() == pytest.approx([-math.log(sigmoid(0.5)), -math.log(sigmoid(1))])
    centred = reference.preference_losses(chosen, rejected, center_rewards_coefficient=0.1)
    assert (centred - plain).tolist() == pytest.approx([0.9, 0.1])


def test_the_margin_of_a_row_reaches_its_loss() -> None:
    settings = settings_of()
    rows = [pair([0, 1], [2, 0], 0.5), pair([3, 2], [1, 1, 3], 0.0)]
    (step,) = reference.supervised_train(worth(), [[[rows]]], settings, reference.reward_objective(settings))
    assert step.loss == pytest.approx((-math.log(sigmoid(0.5)) - math.log(sigmoid(5))) / 2)
    assert reference.supervised_logs([step], settings)["margin"] == 3  # of rewards, without the column


def test_a_pair_with_equal_rewards_is_no_correct_one() -> None:
    settings = settings_of()
    rows = [pair([1], [0, 1]), pair([2], [1]), pair([0], [1])]
    (step,) = reference.supervised_train(worth(), [[[rows]]], settings, reference.reward_objective(settings))
    assert reference.supervised_logs([step], settings)["accuracy"] == pytest.approx(1 / 3)


def test_micro_batches_and_ranks_make_no_difference_but_for_extremes() -> None:
    rows = [*ROWS, pair([1], [2]), pair([0], [3, 1])]
    whole = settings_of(max_steps=1)
    (one,) = reference.supervised_train(random_values(4), [[[rows]]], whole, reference.reward_objective(whole))
    shared = settings_of(world_size=2, gradient_accumulation_steps=2, max_steps=1)
    parts = [[[rows[0]], [rows[1]]], [[rows[2]], [rows[3]]]]
    (other,) = reference.supervised_train(random_values(4), [parts], shared, reference.reward_objective(shared))
    assert torch.allclose(one.gradients["table"], other.gradients["table"])
    first, second = reference.supervised_logs([one], whole), reference.supervised_logs([other], shared)
    for name in ("loss", "accuracy", "margin", "mean_reward", "num_tokens"):
        assert first[name] == pytest.approx(second[name])


@pytest.mark.parametrize("over, smallest, largest", [("ranks", -2.0, 3.0), ("rank", -1.0, 2.0)])
def test_extremes_of_ranks(over: str, smallest: float, largest: float) -> None:
    settings = settings_of(world_size=2, undecided=RewardUndecided(extremes_over=over))
    parts = [[[ROWS[0]], [ROWS[1]]]]
    (step,) = reference.supervised_train(worth(), [parts], settings, reference.reward_objective(settings))
    logs = reference.supervised_logs([step], settings)
    assert (logs["min_reward"], logs["max_reward"]) == (smallest, largest)


def test_an_evaluation_weighs_pairs() -> None:
    settings = settings_of()
    found = reference.supervised_evaluate(worth(), [[ROWS], [ROWS[:1]]], settings, reference.reward_objective(settings))
    first, second = -math.log(sigmoid(1)), -math.log(sigmoid(5))
    assert found.logs["eval_loss"] == pytest.approx((2 * first + second) / 3)
    assert found.logs["eval_margin"] == pytest.approx((1 + 5 + 1) / 3)


def test_a_model_with_one_number_for_a_sequence() -> None:
    class Sums(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.weight * input_ids.sum(1, keepdim=True).float()

    assert reference.sequence_rewards(Sums(), [[1, 2, 3], [4]]).tolist() == [6, 4]
    with pytest.raises(ValueError, match="gives 4 numbers for a sequence of 3 tokens"):
        reference.sequence_rewards(lambda_model(4), [[1, 2, 3]])


def lambda_model(count: int) -> Any:
    class Wrong(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1, count))

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.weight

    return Wrong()


@pytest.mark.parametrize("name", ["extremes_over", "appended_eos", "metrics_mean"])
def test_an_unknown_reading_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='perhaps'"):
        RewardUndecided(**{name: "perhaps"})
