"""A step of PPO by hand, and its parts: rewards, whitening, advantages, and clipped losses."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_trlcompat import reference
from pytest_trlcompat.reference import Episodes, PPOUndecided

from .reference_models import Bigrams, Values, ppo_settings_of, tilted, uniform

PAIR = Episodes(queries=[[2], [2]], responses=[[3, 1], [2]], scores=[1.0, 0.0])
"""After the query 2: 3 and the end of sequence 1; and 2, without an end."""
VALUES = Values(torch.tensor([0.0, 0.0, 0.5, -0.25], dtype=torch.float64))


def test_a_step_by_hand() -> None:
    settings = ppo_settings_of(
        kl_coef=0.1,
        gamma=0.9,
        lam=0.8,
        vf_coef=0.2,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=None,
        missing_eos_penalty=0.7,
    )
    step = reference.ppo_step(uniform(), VALUES, PAIR, settings, reference_model=tilted())
    made = step.experience
    ln2, ln15 = math.log(2), math.log(1.5)
    assert made.logprobs.tolist() == [pytest.approx([-math.log(4)] * 2), pytest.approx([-math.log(4), 0])]
    assert made.kl.tolist() == [pytest.approx([-ln2, 0]), pytest.approx([ln15, 0])]
    assert made.values.tolist() == [[0.5, -0.25], [0.5, 0]]
    assert made.has_eos.tolist() == [True, False]
    assert made.penalised_scores.tolist() == pytest.approx([1.0, -0.7])
    assert made.rewards.tolist() == [pytest.approx([0.1 * ln2, 1.0]), pytest.approx([-0.1 * ln15 - 0.7, 0])]
    # The last step has delta = r - V, the first one r + 0.9 V' - V, and 0.72 of what follows.
    second = 1.0 + 0.25
    first = 0.1 * ln2 - 0.9 * 0.25 - 0.5 + 0.72 * second
    other = -0.1 * ln15 - 0.7 - 0.5
    assert made.returns.tolist() == [pytest.approx([first + 0.5, second - 0.25]), pytest.approx([other + 0.5, 0])]
    mean = (first + second + other) / 3
    scale = math.sqrt(sum((each - mean) ** 2 for each in (first, second, other)) / 3 + 1e-8)
    white = [(each - mean) / scale for each in (first, second, other)]
    assert made.advantages.tolist() == [pytest.approx(white[:2]), pytest.approx([white[2], 0])]

    (update,) = step.optimizer_steps
    (batch,) = update.micro_batches
    assert batch.ratios.tolist() == [[1, 1], [1, 1]]
    assert batch.policy_losses[batch.mask].tolist() == pytest.approx([-each for each in white])
    assert batch.value_losses[batch.mask].tolist() == pytest.approx([0.5 * x * x for x in (first, second, other)])
    value_loss = (first**2 + second**2 + other**2) / 6
    assert float(update.policy_loss) == pytest.approx(0)
    assert float(update.value_loss) == pytest.approx(value_loss)
    assert float(update.loss) == pytest.approx(0.2 * value_loss)
    # The gradient of -A log pi / 3, and of 0.2 (V - R)^2 / 6 with R - V = A before whitening.
    policy = torch.zeros(4, 4, dtype=torch.float64)
    policy[2] += (white[0] + white[2]) / 3 / 4
    policy[2, 3] -= white[0] / 3
    policy[2, 2] -= white[2] / 3
    policy[3] += white[1] / 3 / 4
    policy[3, 1] -= white[1] / 3
    values = torch.tensor([0, 0, -(first + other), -second], dtype=torch.float64) * 0.2 / 3
    assert torch.allclose(update.gradients["policy.table"], policy)
    assert torch.allclose(update.gradients["value_model.table"], values)
    assert float(update.grad_norm) == pytest.approx(math.sqrt(float((policy**2).sum() + (values**2).sum())))
    assert torch.allclose(update.weights["policy.table"], -0.5 * policy)
    assert torch.allclose(update.weights["value_model.table"], VALUES.table - 0.5 * values)
    divergence = (-ln2 + ln15) / 2
    assert step.logs == pytest.approx(
        {
            "objective/kl": divergence,
            "objective/entropy": 1.5 * math.log(4),
            "objective/non_score_reward": -0.1 * divergence,
            "objective/rlhf_reward": 0.15 - 0.1 * divergence,
            "objective/scores": 0.15,
            "val/num_eos_tokens": 1,
            "policy/approxkl_avg": 0,
            "policy/clipfrac_avg": 0,
            "loss/policy_avg": 0,
            "loss/value_avg": value_loss,
            "val/clipfrac_avg": 0,
            "policy/entropy_avg": math.log(4),
            "val/ratio": 1,
            "val/ratio_var": 0,
            "lr": 0.5,
            "episode": 2,
        }
    )


def test_a_score_after_the_last_token_by_hand() -> None:
    undecided = PPOUndecided(score_at="after_last_token")
    settings = ppo_settings_of(kl_coef=0.1, gamma=0.9, lam=0.8, undecided=undecided)
    episodes = Episodes(PAIR.queries, PAIR.responses, [1.0, 4.0])
    made = reference.ppo_step(uniform(), VALUES, episodes, settings, reference_model=tilted()).experience
    # The first response fills the batch's width; the second has one more step, whose state ends with 2.
    assert made.step_mask.tolist() == [[True, True], [True, True]]
    assert made.values.tolist() == [[0.5, -0.25], [0.5, 0.5]]
    assert made.rewards.tolist() == [
        pytest.approx([0.1 * math.log(2), 1.0]),
        pytest.approx([-0.1 * math.log(1.5), 4.0]),
    ]
    own = -0.1 * math.log(1.5) + 0.9 * 0.5 - 0.5 + 0.72 * 3.5
    assert made.returns[1].tolist() == pytest.approx([own + 0.5, 4.0])
    assert made.advantages[1, 1] == 0


def test_a_score_has_a_step_of_its_own_where_its_rank_has_place() -> None:
    lengths = torch.tensor([1, 2, 4, 3])
    mask = torch.arange(4)[None] < lengths[:, None]
    assert reference.step_mask(mask, False).sum(1).tolist() == [1, 2, 4, 3]
    assert reference.step_mask(mask, True).sum(1).tolist() == [2, 3, 4, 4]
    assert reference.step_mask(mask, True, ranks=2).sum(1).tolist() == [2, 2, 4, 4]


def test_estimators_of_the_divergence() -> None:
    policy, other = torch.tensor([[math.log(0.2)]]), torch.tensor([[math.log(0.5)]])
    assert float(reference.divergence(policy, other, "k1")) == pytest.approx(math.log(0.4))
    assert float(reference.divergence(policy, other, "k3")) == pytest.approx(2.5 - 1 - math.log(2.5))


def test_whitening_is_that_of_the_published_example() -> None:
    values = torch.tensor([[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]])
    everything = torch.ones_like(values, dtype=torch.bool)
    biased = reference.whiten(values, everything, shift_mean=False, correction=0)
    unbiased = reference.whiten(values, everything, shift_mean=False, correction=1)
    assert biased[0].tolist() == pytest.approx([0.0508, 0.4381, 0.8254], abs=1e-4)
    assert unbiased[2].tolist() == pytest.approx([2.3303, 2.6954, 3.0606], abs=1e-4)
    shifted = reference.whiten(values, everything, shift_mean=True, correction=0)
    assert float(shifted.mean()) == pytest.approx(0, abs=1e-6)
    some = everything & (values < 1.75)
    alone = reference.whiten(values[:2], everything[:2], shift_mean=True, correction=0)
    masked = reference.whiten(values, some, shift_mean=True, correction=0)
    assert torch.allclose(masked[:2], alone)
    assert masked[2].tolist() == [0, 0, 0]


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (0.9, 0.0), (0.7, 1.0)])
def test_advantages_are_the_sums_of_equation_16(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator)
    lengths = [5, 3, 1]
    steps = torch.arange(5)[None] < torch.tensor(lengths)[:, None]
    rewards, values = rewards * steps, values * steps
    found = reference.advantage_estimates(rewards, values, steps, gamma=gamma, lam=lam)
    for row, length in enumerate(lengths):
        for t in range(5):
            expected = 0.0
            for later in range(t, length):
                following = float(values[row, later + 1]) if later + 1 < length else 0.0
                delta = float(rewards[row, later]) + gamma * following - float(values[row, later])
                expected += (gamma * lam) ** (later - t) * delta
            assert float(found[row, t]) == pytest.approx(expected)
    if lam == 1.0:  # the discounted sum of rewards less the value
        discounted = sum(gamma**t * float(rewards[0, t]) for t in range(5))
        assert float(found[0, 0]) == pytest.approx(discounted - float(values[0, 0]))


@pytest.mark.parametrize(
    "ratio, advantage, loss, is_clipped, out_of_range",
    [
        (1.5, 2.0, -1.2 * 2.0, True, True),
        (1.5, -2.0, 1.5 * 2.0, False, True),
        (0.5, 2.0, -0.5 * 2.0, False, True),
        (0.5, -2.0, 0.8 * 2.0, True, True),
        (1.1, 2.0, -1.1 * 2.0, False, False),
    ],
)
def test_clipping_of_the_policy_is_that_of_the_papers_first_figure(
    ratio: float, advantage: float, loss: float, is_clipped: bool, out_of_range: bool
) -> None:
    ratios, advantages = torch.tensor([[ratio]]), torch.tensor([[advantage]])
    found, clipped = reference.clipped_policy_losses(ratios, advantages, 0.2)
    assert float(found) == pytest.approx(loss)
    assert bool(clipped) == is_clipped
    assert bool(reference.clipped_policy_losses(ratios, advantages, 0.2, clipped_by="range")[1]) == out_of_range


@pytest.mark.parametrize(
    "value, target, loss, is_clipped",
    [
        (1.5, 3.0, 0.5 * 1.8**2, True),  # 1.2 is farther from the return
        (1.5, 0.0, 0.5 * 1.5**2, False),  # 1.5 is
        (0.5, 0.0, 0.5 * 0.8**2, True),
        (1.1, 0.0, 0.5 * 1.1**2, False),
    ],
)
def test_clipping_of_the_value_function(value: float, target: float, loss: float, is_clipped: bool) -> None:
    new, old, returns = (torch.tensor([[each]]) for each in (value, 1.0, target))
    found, clipped = reference.clipped_value_losses(new, old, returns, 0.2)
    assert float(found) == pytest.approx(loss)
    assert bool(clipped) == is_clipped
    assert float(reference.clipped_value_losses(new, old, returns, 0.2, scale=1.0)[0]) == pytest.approx(2 * loss)
    assert bool(reference.clipped_value_losses(new, old, returns, 0.2, clipped_by="range")[1]) == (abs(value - 1) > 0.2)


def test_scores_and_penalties() -> None:
    scores, ends = torch.tensor([1.0, 2.0]), torch.tensor([True, False])
    assert reference.penalised_scores(scores, ends, ends, ppo_settings_of()).tolist() == [1.0, 2.0]
    settings = ppo_settings_of(missing_eos_penalty=0.5)
    assert reference.penalised_scores(scores, ends, ends, settings).tolist() == [1.0, 1.5]
    settings = ppo_settings_of(stop_token_id=1, non_eos_penalty=True)
    assert reference.penalised_scores(scores, ends, ends, settings).tolist() == [1.0, -1.0]


def test_a_reward_model_sees_the_response_up_to_its_stop_token() -> None:
    scorer = Values(torch.arange(8, dtype=torch.float64) * 10)
    episodes = Episodes(queries=[[2, 3], [4]], responses=[[5, 6, 1], [7, 3]])
    for stop, expected in ((None, [10, 30]), (6, [60, 30]), (7, [10, 70])):
        step = reference.ppo_step(
            Bigrams(torch.zeros(8, 8, dtype=torch.float64)),
            Values(torch.zeros(8, dtype=torch.float64)),
            episodes,
            ppo_settings_of(stop_token_id=stop),
            reward_model=scorer,
        )
        assert step.experience.scores.tolist() == expected
    assert step.experience.tokens.completion_mask.tolist() == [[True, True, True], [True, False, False]]


def test_an_end_of_sequence_in_the_middle_is_undecided() -> None:
    episodes = Episodes(queries=[[2], [2], [2]], responses=[[1, 3], [3, 1], [3, 3]], scores=[0.0] * 3)
    for must_end, expected in ((False, [True, True, False]), (True, [False, True, False])):
        settings = ppo_settings_of(undecided=PPOUndecided(eos_must_end=must_end))
        assert reference.ppo_step(uniform(), VALUES, episodes, settings).experience.has_eos.tolist() == expected
    behind = ppo_settings_of(stop_token_id=3, undecided=PPOUndecided(eos_counted_in="sampled"))
    assert reference.ppo_step(uniform(), VALUES, episodes, behind).logs["val/num_eos_tokens"] == 2
    assert (
        reference.ppo_step(uniform(), VALUES, episodes, ppo_settings_of(stop_token_id=3)).logs["val/num_eos_tokens"]
        == 1
    )
