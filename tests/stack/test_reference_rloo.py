"""RLOO by the reference: by hand on a model that can be worked out, and by what must hold for any model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference
from pytest_trlcompat.reference import RLOOAdvantages, RLOOSettings, RLOOStep, RLOOUndecided, Rollout

from .reference_models import ROWS, Bigrams, random_bigrams, uniform

PAIR = Rollout(prompts=[[2], [2]], completions=[[3, 1], [2]], rewards=[[1.0], [0.0]])
"""After the prompt 2: 3 and the end of sequence 1; and 2, truncated."""
NAN = float("nan")


def settings_of(**settings: Any) -> RLOOSettings:
    base = {"num_generations": 4, "max_completion_length": 4, "optim": "sgd", "learning_rate": 0.1, "beta": 0.0}
    return RLOOSettings(**{**base, **settings})


def advantages_of(rewards: list[list[float]], size: int, **arguments: Any) -> RLOOAdvantages:
    return reference.leave_one_out_advantages(torch.tensor(rewards, dtype=torch.float64), size, **arguments)


def test_a_step_by_hand() -> None:
    settings = settings_of(num_generations=2, learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=None)
    step = reference.rloo_step(uniform(), PAIR, settings)
    (generation,), (batch,) = step.generations, step.micro_batches
    assert generation.advantages.advantages.tolist() == [1, -1]  # the baseline of each is the other's reward
    assert batch.weights.tolist() == [1, 1]
    assert batch.losses.tolist() == [-1, 1]
    assert float(step.loss) == 0
    # REINFORCE: the log-probability of the first completion, of two tokens, has the weight 1/2, of the other one -1/2.
    gradient = torch.zeros(4, 4, dtype=torch.float64)
    gradient[2] = torch.tensor([0, 0, 0.5, -0.5])
    gradient[3] = torch.tensor([1, -3, 1, 1]) / 8
    assert torch.allclose(step.gradients["table"], gradient)
    assert torch.allclose(step.weights["table"], -0.5 * gradient)
    assert step.logs["num_tokens"] == 5
    assert step.logs["reward"] == 0.5
    assert step.logs["reward_std"] == pytest.approx(math.sqrt(0.5))
    assert step.logs["entropy"] == pytest.approx(math.log(4))
    assert "kl" not in step.logs


def test_the_kl_penalty_by_hand() -> None:
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[2, 3] = math.log(3)  # after 2: 1/6, 1/6, 1/6, 1/2
    settings = settings_of(num_generations=2, beta=0.3)
    step = reference.rloo_step(uniform(), PAIR, settings, reference_model=Bigrams(table))
    given = step.generations[0].advantages
    assert isinstance(given, RLOOAdvantages)
    assert given.divergences is not None
    # log(1/4) - log(1/2) for the token 3, nothing for the end of sequence; log(1/4) - log(1/6) for the token 2.
    kl = [-math.log(2), math.log(1.5)]
    assert given.divergences.tolist() == pytest.approx(kl)
    final = [1 - 0.3 * kl[0], -0.3 * kl[1]]
    assert given.final_rewards.tolist() == pytest.approx(final)
    assert given.advantages.tolist() == pytest.approx([final[0] - final[1], final[1] - final[0]])
    assert step.logs["kl"] == pytest.approx(sum(kl) / 2)
    assert step.logs["reward"] == 0.5  # without the penalty
    equal = Rollout(PAIR.prompts, PAIR.completions, [[1.0], [1.0]])
    for logged in ("totals", "final"):
        other = replace(settings, undecided=RLOOUndecided(rewards_logged=logged))
        logs = reference.rloo_step(uniform(), equal, other, reference_model=Bigrams(table)).logs
        assert logs["frac_reward_zero_std"] == 1  # all answers are equally good, whatever they are fined
        assert (logs["reward_std"] > 0) is (logged == "final")
    over_tokens = replace(settings, undecided=RLOOUndecided(kl_logged_over="tokens"))
    logs = reference.rloo_step(uniform(), PAIR, over_tokens, reference_model=Bigrams(table)).logs
    assert logs["kl"] == pytest.approx(sum(kl) / 3)
    by_rank = RLOOUndecided(kl_logged_over="tokens", metrics_mean="ranks")
    two_ranks = replace(settings, world_size=2, undecided=by_rank)  # a completion of two tokens, and one of one
    logs = reference.rloo_step(uniform(), PAIR, two_ranks, reference_model=Bigrams(table)).logs
    assert logs["kl"] == pytest.approx((kl[0] / 2 + kl[1]) / 2)


def test_a_baseline_is_the_mean_of_the_others() -> None:
    found = advantages_of([[1.0], [2.0], [6.0], [4.0], [4.0], [4.0]], 3)
    assert found.baselines.tolist() == [4, 3.5, 1.5, 4, 4, 4]
    assert found.advantages.tolist() == [-3, -1.5, 4.5, 0, 0, 0]
    assert found.group_means.tolist() == [3, 3, 3, 4, 4, 4]


def test_a_lone_completion_is_its_own_baseline() -> None:
    assert advantages_of([[3.0], [-1.0]], 1).advantages.tolist() == [0, 0]
    found = advantages_of([[3.0], [NAN], [1.0], [2.0]], 2, no_reward="left_out")
    assert found.advantages.tolist() == [0, 0, -1, 1]


@pytest.mark.parametrize("no_reward, advantages", [("zero", [0.0, 4.5, -4.5]), ("left_out", [-3.0, 3.0, 0.0])])
def test_a_missing_reward(no_reward: str, advantages: list[float]) -> None:
    assert advantages_of([[3.0], [6.0], [NAN]], 3, no_reward=no_reward).advantages.tolist() == advantages


@pytest.mark.parametrize(
    "clipped, final",
    [("totals", [3.0, 0.5]), ("functions", [3.5, 0.75])],
)
def test_rewards_are_clipped(clipped: str, final: list[float]) -> None:
    rewards = [[5.0, 1.0], [0.0, 0.0]]
    found = advantages_of(rewards, 2, weights=[1.0, 0.5], clip_range=(0.5, 3.0), clipped=clipped)
    assert found.final_rewards.tolist() == final


def test_what_is_clipped_where_there_is_a_penalty() -> None:
    divergences = torch.tensor([1.0, -1.0], dtype=torch.float64)
    rewards = [[5.0], [2.0]]
    before = advantages_of(rewards, 2, clip_range=(0.0, 3.0), divergences=divergences, beta=2.0)
    assert before.final_rewards.tolist() == [1, 4]
    assert before.totals.tolist() == [5, 2]
    after = advantages_of(rewards, 2, clip_range=(0.0, 3.0), clipped="with_kl", divergences=divergences, beta=2.0)
    assert after.final_rewards.tolist() == [3, 3]
    penalised = {"divergences": divergences, "beta": 2.0}
    assert advantages_of(rewards, 2, clip_range=(0.0, 3.0), logged="clipped", **penalised).totals.tolist() == [3, 2]
    assert advantages_of(rewards, 2, clip_range=(0.0, 3.0), logged="final", **penalised).totals.tolist() == [1, 4]
    both = [[5.0, 1.0], [2.0, 2.0]]
    found = advantages_of(both, 2, weights=[1.0, 0.5], logged="unweighted")
    assert (found.totals.tolist(), found.final_rewards.tolist()) == ([6, 4], [5.5, 3])


def test_advantages_are_normalised_over_the_batch() -> None:
    rewards = [[1.0], [3.0], [0.0], [8.0]]  # -2, 2, -8, 8: mean 0, variance 136 / 3
    found = advantages_of(rewards, 2, normalize=True, std_epsilon=0.0)
    deviation = math.sqrt(136 / 3)
    assert found.advantages.tolist() == pytest.approx([each / deviation for each in (-2, 2, -8, 8)])


def test_ratios_are_those_of_whole_completions_and_clipped() -> None:
    ratios = torch.tensor([0.5, 0.5, 2.0, 2.0, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    losses = reference.sequence_losses(ratios, advantages, 0.2, 0.3)
    assert losses.tolist() == pytest.approx([-0.5, 0.8, -1.3, 2.0, -2.2])
    mask = torch.tensor([[True, True], [True, False]])
    found = reference.sequence_log_ratios(torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.zeros(2, 2), mask)
    assert found.tolist() == [3, 3]


def off_policy(**settings: Any) -> tuple[Bigrams, dict[str, Any], RLOOSettings]:
    old = random_bigrams()
    policy = Bigrams(old.table.detach() + 0.15 * random_bigrams(seed=1).table.detach())
    base = {"beta": 0.2, "temperature": 0.8, "epsilon": 0.1, "epsilon_high": 0.15, "world_size": 2}
    models = {"old_model": old, "reference_model": random_bigrams(seed=2)}
    return policy, models, settings_of(**{**base, **settings})


@pytest.mark.parametrize("excluded", [False, True])
def test_gradients_are_finite_differences_of_the_loss(excluded: bool) -> None:
    policy, models, settings = off_policy(mask_truncated_completions=excluded)
    direction = random_bigrams(seed=3).table.detach()

    def step(distance: float) -> RLOOStep:
        return reference.rloo_step(Bigrams(policy.table.detach() + distance * direction), ROWS, settings, **models)

    expected = (step(1e-6).loss - step(-1e-6).loss) / 2e-6
    found = step(0.0)
    assert 0 < found.logs["clip_ratio/region_mean"] < 1
    assert float((found.gradients["table"] * direction).sum()) == pytest.approx(float(expected), rel=1e-5)


def test_truncated_completions_are_excluded_and_still_counted() -> None:
    policy, models, settings = off_policy(mask_truncated_completions=True)
    step = reference.rloo_step(policy, ROWS, settings, **models)
    truncated = [row for one in step.micro_batches for row, loss in zip(one.rows, one.losses, strict=True) if loss == 0]
    assert truncated == [2, 5]
    assert float(step.loss) == pytest.approx(sum(float(one.losses.sum()) for one in step.micro_batches) / 8)
    only = replace(settings, undecided=RLOOUndecided(masked_completions_count=False))
    other = reference.rloo_step(policy, ROWS, only, **models)
    means = [float(one.losses.sum()) / 3 for one in step.micro_batches]
    assert float(other.loss) == pytest.approx(sum(means) / 2)


def test_iterations_keep_the_penalty_of_the_policy_that_sampled() -> None:
    settings = settings_of(num_iterations=2, beta=0.5, learning_rate=1.0)
    first, second = reference.rloo_train(random_bigrams(), [ROWS], settings, reference_model=random_bigrams(seed=2))
    assert first.generations[0] is second.generations[0]
    assert first.micro_batches[0].weights.tolist() == pytest.approx([1.0] * 8)
    assert max(abs(each - 1) for each in second.micro_batches[0].weights.tolist()) > 0.1
    assert "kl" in first.logs
    assert "kl" not in second.logs


def test_ranks_and_micro_batches_make_no_difference() -> None:
    policy, models, settings = off_policy(world_size=1)
    whole = reference.rloo_step(policy, ROWS, settings, **models)
    shared = replace(settings, world_size=2, gradient_accumulation_steps=2)
    parts = reference.rloo_step(policy, ROWS, shared, **models)
    assert len(parts.micro_batches) == 4
    assert torch.allclose(whole.gradients["table"], parts.gradients["table"])
    assert whole.logs["clip_ratio/region_mean"] == pytest.approx(parts.logs["clip_ratio/region_mean"])


def test_an_evaluation_has_the_loss_of_its_batches() -> None:
    settings = settings_of(num_generations_eval=2, beta=0.5)
    other = random_bigrams(seed=2)
    found = reference.rloo_evaluate(random_bigrams(), [ROWS], settings, reference_model=other)
    # With ratios of 1 the loss is the mean of the negative advantages, which add up to 0 in each group.
    assert found.logs["eval_loss"] == pytest.approx(0.0, abs=1e-12)
    step = reference.rloo_step(random_bigrams(), ROWS, replace(settings, num_generations=2), reference_model=other)
    assert found.logs["eval_kl"] == pytest.approx(step.logs["kl"])
    with pytest.raises(ValueError, match="nothing to evaluate"):
        reference.rloo_evaluate(random_bigrams(), [], settings)


@pytest.mark.parametrize(
    "name, wrong", [("rewards_clipped", "all"), ("kl_logged_over", "groups"), ("no_reward", "nan")]
)
def test_an_unknown_reading_is_refused(name: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{wrong}'"):
        RLOOUndecided(**{name: wrong})  # type: ignore[arg-type]
