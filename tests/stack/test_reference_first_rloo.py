"""A step of the first RLOO by hand, its parts, trainings of it, what is logged, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference
from pytest_trlcompat.reference import Episodes, FirstRLOOSettings, FirstRLOOStep, FirstRLOOUndecided
from pytest_trlcompat.reference.first_rloo_rewards import standardised

from .reference_models import Values, random_bigrams, tilted, uniform

TWICE = Episodes(queries=[[2], [3], [2], [3]], responses=[[3, 1], [1], [2], [2, 2]], scores=[1.0, 0.5, 0.0, -1.0])
"""Two prompts, 2 and 3, twice; the end of sequence is 1, and the last two responses have none."""
LN2, LN4, LN15 = math.log(2), math.log(4), math.log(1.5)


def settings_of(**settings: Any) -> FirstRLOOSettings:
    base = {"response_length": 4, "temperature": 1.0, "optim": "sgd", "learning_rate": 0.1, "num_ppo_epochs": 1}
    return FirstRLOOSettings(**{**base, **settings})


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_step_by_hand() -> None:
    settings = settings_of(
        kl_coef=0.1,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=None,
        missing_eos_penalty=0.7,
    )
    step = reference.first_rloo_step(uniform(), TWICE, settings, reference_model=tilted())
    made = step.experience
    assert made.kl.tolist() == [pytest.approx(row) for row in ([-LN2, 0], [0, 0], [LN15, 0], [0, LN15])]
    assert made.has_eos.tolist() == [True, True, False, False]
    assert made.penalised_scores.tolist() == pytest.approx([1.0, 0.5, -0.7, -1.7])
    rewards = [1.0 + 0.1 * LN2, 0.5, -0.7 - 0.1 * LN15, -1.7 - 0.1 * LN15]
    assert made.credit.rewards.tolist() == pytest.approx(rewards)
    assert made.credit.baselines.tolist() == pytest.approx([rewards[2], rewards[3], rewards[0], rewards[1]])
    first, second = rewards[0] - rewards[2], rewards[1] - rewards[3]
    assert made.credit.advantages.tolist() == pytest.approx([first, second, -first, -second])

    (update,) = step.optimizer_steps
    (batch,) = update.micro_batches
    assert batch.ratios.tolist() == [1, 1, 1, 1]
    assert batch.losses.tolist() == pytest.approx([-first, -second, first, second])
    assert float(update.loss) == pytest.approx(0)
    # The gradient of -A log pi / 4, where that of log pi is 1 at the token, less 1/4 everywhere, in the row before it.
    gradient = torch.zeros(4, 4, dtype=torch.float64)
    gradient[2] = -tensor(second / 4, second / 4, second / 4 - first - second, second / 4 + first) / 4
    gradient[3] = -tensor(-first / 4, 3 / 4 * first + second, -first / 4 - second, -first / 4) / 4
    assert torch.allclose(update.gradients["table"], gradient)
    assert torch.allclose(update.weights["table"], -0.5 * gradient)
    divergence = (2 * LN15 - LN2) / 4
    assert step.logs == pytest.approx(
        {
            "objective/kl": divergence,
            "objective/entropy": 1.5 * LN4,
            "objective/non_score_reward": -0.1 * divergence,
            "objective/rlhf_reward": sum(rewards) / 4,
            "objective/scores": -0.225,
            "val/num_eos_tokens": 2,
            "policy/approxkl_avg": 0,
            "policy/clipfrac_avg": 0,
            "loss/policy_avg": 0,
            "policy/entropy_avg": LN4,
            "val/ratio": 1,
            "val/ratio_var": 0,
            "lr": 0.5,
            "episode": 4,
        }
    )


def test_baselines_are_those_of_the_documentation() -> None:
    """Four completions of three prompts, at https://huggingface.co/docs/trl/v0.21.0/rloo_trainer."""
    rewards = tensor(1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    baselines = reference.leave_one_out_baselines(rewards, 4)
    advantages = rewards - baselines
    assert float(advantages[0]) == pytest.approx(1 - (2 + 5 + 8) / 3)
    assert float(advantages[7]) == pytest.approx(6 - (3 + 2 + 9) / 3)
    # Of two ranks each has whole groups: 1 and 3, 2 and 4; 5 and 7, 6 and 8.
    assert reference.leave_one_out_baselines(tensor(1, 2, 3, 4, 5, 6, 7, 8), 2, ranks=2).tolist() == [
        *(3, 4, 1, 2),
        *(7, 8, 5, 6),
    ]


def test_numbers_are_standardised_over_the_batch_or_each_rank() -> None:
    values = tensor(1, 2, 3, 6)  # mean 3, squares 4 1 0 9
    assert standardised(values, settings_of()).tolist() == pytest.approx(
        [each / math.sqrt(3.5) for each in (-2, -1, 0, 3)]
    )
    sample = FirstRLOOUndecided(std_correction=1, std_epsilon=0.5, normalised_over="rank")
    ranks = settings_of(undecided=sample, world_size=2)
    assert standardised(values, ranks).tolist() == pytest.approx(
        [each / (math.sqrt(0.5) + 0.5) for each in (-0.5, 0.5)]
        + [each / (math.sqrt(4.5) + 0.5) for each in (-1.5, 1.5)]
    )
    assert standardised(values, settings_of(), keep_mean=True).tolist() == pytest.approx(
        [3 + each / math.sqrt(3.5) for each in (-2, -1, 0, 3)]
    )


def test_rewards_or_scores_are_normalised_and_clipped() -> None:
    scores, kl = tensor(1, 2, 3, 6), tensor(10, 0, 0, -10)
    settings = {"kl_coef": 0.1, "normalize_reward": True, "reward_clip_range": 1.0}
    of_scores = settings_of(**settings, undecided=FirstRLOOUndecided(normalised="scores"))
    rewards = reference.completion_advantages(scores, kl, of_scores).rewards
    assert rewards.tolist() == pytest.approx([-1 - 1, -1 / math.sqrt(3.5), 0, 1 + 1])
    # 0, 2, 3, 7 have a mean of 3 and squares of 9 1 0 16.
    rewards = reference.completion_advantages(scores, kl, settings_of(**settings)).rewards
    assert rewards.tolist() == pytest.approx([-1, -1 / math.sqrt(6.5), 0, 1])
    alone = reference.completion_advantages(scores, kl, settings_of(kl_coef=0.1, reward_clip_range=2.5)).rewards
    assert alone.tolist() == [0, 2, 2.5, 2.5]
    none = reference.completion_advantages(20 * scores, kl, settings_of(kl_coef=0.1, reward_clip_range=None)).rewards
    assert none.tolist() == [19, 40, 60, 121]


def test_rewards_are_whitened_before_their_baselines_and_advantages_normalised_after() -> None:
    scores, kl = tensor(1, 2, 3, 6), tensor(0, 0, 0, 0)
    white = reference.completion_advantages(scores, kl, settings_of(whiten_rewards=True))
    assert white.rewards.tolist() == [1, 2, 3, 6]
    scaled = [3 + each / math.sqrt(3.5) for each in (-2, -1, 0, 3)]
    assert white.whitened_rewards.tolist() == pytest.approx(scaled)
    assert white.baselines.tolist() == pytest.approx([scaled[2], scaled[3], scaled[0], scaled[1]])
    plain = reference.completion_advantages(scores, kl, settings_of())
    assert plain.advantages.tolist() == [-2, -4, 2, 4]
    normal = reference.completion_advantages(scores, kl, settings_of(normalize_advantage=True))
    assert normal.advantages.tolist() == pytest.approx([each / math.sqrt(10) for each in (-2, -4, 2, 4)])


def step_of(**settings: Any) -> FirstRLOOStep:
    return reference.first_rloo_step(
        random_bigrams(), TWICE, settings_of(**settings), reference_model=random_bigrams(seed=1)
    )


def test_a_completion_is_one_action_in_every_update() -> None:
    given = {"num_ppo_epochs": 2, "num_mini_batches": 2, "learning_rate": 2.0, "max_grad_norm": None, "cliprange": 0.1}
    step = step_of(**given)
    assert [each.micro_batches[0].rows for each in step.optimizer_steps] == [(0, 1), (2, 3)] * 2
    batches = [each.micro_batches[0] for each in step.optimizer_steps]
    advantages = step.experience.credit.advantages
    for update, one in zip(step.optimizer_steps, batches, strict=True):
        rows = list(one.rows)
        old = (step.experience.logprobs[rows] * one.mask).sum(1)
        ratios = ((one.logprobs * one.mask).sum(1) - old).exp()
        assert torch.allclose(one.ratios, ratios)
        pairs = zip(ratios.tolist(), advantages[rows].tolist(), strict=True)
        losses = [-min(ratio * own, min(max(ratio, 0.9), 1.1) * own) for ratio, own in pairs]
        assert one.losses.tolist() == pytest.approx(losses)
        assert float(update.loss) == pytest.approx(sum(losses) / 2)
    whole = torch.cat([one.ratios for one in batches])
    assert float(whole.std()) > 1e-3
    assert step.logs["val/ratio"] == pytest.approx(float(whole.mean()))
    assert step.logs["val/ratio_var"] == pytest.approx(float(whole.var()))
    assert step.logs["policy/approxkl_avg"] == pytest.approx(float((0.5 * whole.log() ** 2).mean()))
    clipped = [
        bool((ratio - 1) * own > 0.1 * abs(own))
        for one in batches
        for ratio, own in zip(one.ratios.tolist(), advantages[list(one.rows)].tolist(), strict=True)
    ]
    assert 0 < sum(clipped) < 8
    assert step.logs["policy/clipfrac_avg"] == pytest.approx(sum(clipped) / 8)

    of_tokens = FirstRLOOUndecided(ratio_of="tokens", approximate_kl_of="tokens")
    logs = step_of(**given, undecided=of_tokens).logs
    tokens = torch.cat([one.log_ratios[one.mask] for one in batches])
    assert logs["val/ratio"] == pytest.approx(float(tokens.exp().mean()))
    assert logs["val/ratio_var"] == pytest.approx(float(tokens.exp().var()))
    assert logs["policy/approxkl_avg"] == pytest.approx(float((0.5 * tokens**2).mean()))
    by_micro = FirstRLOOUndecided(ratio_of="tokens", metrics_mean="micro_batches", ratio_var_over="micro_batches")
    logs = step_of(**given, undecided=by_micro).logs
    means = torch.stack([one.log_ratios[one.mask].exp().mean() for one in batches])
    assert logs["val/ratio"] == pytest.approx(float(means.mean()))
    assert logs["val/ratio_var"] == pytest.approx(float(means.var()))


def test_ranks_and_micro_batches_give_the_step_of_a_single_one() -> None:
    whole = step_of()
    # Of two ranks each has its own groups: the same rows as one rank has with them next to each other.
    order = [0, 2, 1, 3]
    scores = TWICE.scores or []
    rows = Episodes(
        queries=[TWICE.queries[row] for row in order],
        responses=[TWICE.responses[row] for row in order],
        scores=[scores[row] for row in order],
    )
    for parts in ({"world_size": 2}, {"world_size": 2, "gradient_accumulation_steps": 2}):
        step = reference.first_rloo_step(
            random_bigrams(), rows, settings_of(**parts), reference_model=random_bigrams(seed=1)
        )
        assert torch.allclose(step.experience.credit.advantages, whole.experience.credit.advantages[order])
        assert len(step.optimizer_steps[0].micro_batches) == math.prod(parts.values())
        assert torch.allclose(step.optimizer_steps[0].gradients["table"], whole.optimizer_steps[0].gradients["table"])


def test_token_level_divergences_add_up_to_that_of_the_completion() -> None:
    assert torch.equal(
        step_of(token_level_kl=True).optimizer_steps[0].weights["table"],
        step_of().optimizer_steps[0].weights["table"],
    )


def test_a_training_goes_on_from_what_was_trained() -> None:
    settings = settings_of(learning_rate=1.0, max_grad_norm=None, lr_scheduler_type="linear")
    first, second = reference.first_rloo_train(random_bigrams(), [TWICE, TWICE], settings)
    assert first.logs["objective/kl"] == 0
    assert abs(second.logs["objective/kl"]) > 1e-4
    assert [first.logs["episode"], second.logs["episode"]] == [4, 8]
    assert [first.logs["lr"], second.logs["lr"]] == [1.0, 0.5]
    after = first.optimizer_steps[-1].weights["table"]
    assert torch.equal(second.experience.logprobs[0, 0], torch.log_softmax(after, -1)[2, 3])


def test_a_reward_model_scores_what_is_kept() -> None:
    asked = Episodes(TWICE.queries, [[3, 1, 3], [1, 2], [2], [2, 2]])
    scorer = Values(tensor(0.0, 0.25, 0.5, 2.0))
    step = reference.first_rloo_step(uniform(), asked, settings_of(stop_token_id=1), reward_model=scorer)
    assert step.experience.scores.tolist() == [0.25, 0.25, 0.5, 0.5]
    assert step.experience.tokens.lengths.tolist() == [2, 1, 1, 2]
    whole = reference.first_rloo_step(uniform(), asked, settings_of(), reward_model=scorer)
    assert whole.experience.scores.tolist() == [2.0, 0.5, 0.5, 0.5]
    assert whole.experience.tokens.lengths.tolist() == [3, 2, 1, 2]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"rloo_k": 1}, "rloo_k=1, but the baseline of a completion is the mean of the others"),
        ({"rloo_k": 3}, "4 completions are no whole groups of 3 on 1 ranks"),
        ({"temperature": 0.0}, "temperature=0.0 is not positive"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        step_of(**given)


def test_a_choice_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="normalised='advantages'"):
        FirstRLOOUndecided(normalised="advantages")
