"""Trainings of PPO's reference: batches, epochs, mini-batches, ranks, what is logged, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference, tiny
from pytest_trlcompat.reference import Episodes, PPOSettings, PPOStep, PPOUndecided

from .reference_models import (
    ADAMW,
    EPISODES,
    Bigrams,
    assert_pytorch_steps_so,
    ppo_settings_of,
    random_bigrams,
    random_values,
    uniform,
)
from .test_reference_training import is_equal

OTHER = Episodes(queries=EPISODES.queries, responses=[[2, 1], [3], [7, 7, 7, 7], [4, 1]], scores=[0.0, 1.0, 2.0, -1.0])


def step_of(**settings: Any) -> PPOStep:
    other = random_bigrams(seed=1)
    return reference.ppo_step(
        random_bigrams(), random_values(), EPISODES, ppo_settings_of(**settings), reference_model=other
    )


def test_the_reference_model_is_the_untrained_policy_by_default() -> None:
    settings = ppo_settings_of(learning_rate=1.0, max_grad_norm=None)
    first, second = reference.ppo_train(random_bigrams(), random_values(), [EPISODES, OTHER], settings)
    assert first.logs["objective/kl"] == 0
    assert abs(second.logs["objective/kl"]) > 1e-4
    assert [first.logs["episode"], second.logs["episode"]] == [4, 8]
    # The second batch is scored by models that have been trained, which is a training of its own from there.
    after = first.optimizer_steps[-1].weights
    assert torch.equal(
        second.experience.logprobs[0, 0], torch.log_softmax(after["policy.table"], -1)[EPISODES.queries[0][-1], 2]
    )
    assert torch.equal(second.experience.values[0, 0], after["value_model.table"][EPISODES.queries[0][-1]])


def test_epochs_and_mini_batches_are_optimizer_steps_on_one_experience() -> None:
    step = step_of(num_ppo_epochs=2, num_mini_batches=2, learning_rate=2.0, max_grad_norm=None)
    assert [each.micro_batches[0].rows for each in step.optimizer_steps] == [(0, 1), (2, 3)] * 2
    ratios = [each.micro_batches[0].ratios[each.micro_batches[0].mask] for each in step.optimizer_steps]
    assert set(ratios[0].tolist()) == {1.0}
    assert all(float(each.std()) > 1e-3 for each in ratios[1:])
    for one in step.optimizer_steps:
        (batch,) = one.micro_batches
        ratio = (batch.logprobs - step.experience.logprobs[list(batch.rows)]).exp()
        assert torch.equal(batch.ratios, ratio)
    whole = torch.cat(ratios)
    assert step.logs["val/ratio"] == pytest.approx(float(whole.mean()))
    assert step.logs["val/ratio_var"] == pytest.approx(float(whole.var()))
    k2 = 0.5 * whole.log() ** 2
    assert step.logs["policy/approxkl_avg"] == pytest.approx(float(k2.mean()))
    losses = [float(each.policy_loss) for each in step.optimizer_steps]
    assert step.logs["loss/policy_avg"] == pytest.approx(sum(losses) / 4)
    losses = [float(each.value_loss) for each in step.optimizer_steps]
    assert step.logs["loss/value_avg"] == pytest.approx(sum(losses) / 4)
    by_micro = step_of(
        num_ppo_epochs=2,
        num_mini_batches=2,
        learning_rate=2.0,
        max_grad_norm=None,
        undecided=PPOUndecided(metrics_mean="micro_batches", ratio_var_over="micro_batches"),
    )
    means = torch.stack([each.mean() for each in ratios])
    assert by_micro.logs["val/ratio"] == pytest.approx(float(means.mean()))
    assert by_micro.logs["val/ratio_var"] == pytest.approx(float(means.var()))


def test_clip_fractions_and_entropy_are_means_over_tokens_and_steps() -> None:
    step = step_of(num_ppo_epochs=3, learning_rate=3.0, max_grad_norm=None, cliprange=0.05, cliprange_value=0.05)
    batches = [batch for each in step.optimizer_steps for batch in each.micro_batches]
    tokens = sum(int(each.mask.sum()) for each in batches)
    for name, clipped in (("policy/clipfrac_avg", "policy_clipped"), ("val/clipfrac_avg", "value_clipped")):
        count = sum(int(getattr(each, clipped).sum()) for each in batches)
        assert 0 < count < tokens
        assert step.logs[name] == pytest.approx(count / tokens)
    entropies = torch.cat([each.entropies[each.mask] for each in batches])
    assert step.logs["policy/entropy_avg"] == pytest.approx(float(entropies.mean()))


def test_the_entropy_of_responses() -> None:
    exact, sampled = (
        step_of(undecided=PPOUndecided(objective_entropy=each)).logs["objective/entropy"]
        for each in ("exact", "sampled")
    )
    made = step_of().experience
    assert exact == pytest.approx(float(made.entropies.sum()) / 4)
    assert sampled == pytest.approx(-float(made.logprobs.sum()) / 4)
    assert exact != pytest.approx(sampled)


def test_a_mini_batch_is_the_mean_over_its_tokens_however_it_is_split() -> None:
    whole = step_of().optimizer_steps[0]
    for settings in ({"gradient_accumulation_steps": 2}, {"world_size": 2}, {"world_size": 4}):
        split = step_of(**settings).optimizer_steps[0]
        assert len(split.micro_batches) == max(settings.values())
        for name, gradient in whole.gradients.items():
            assert torch.allclose(gradient, split.gradients[name], rtol=1e-12)
    own = PPOUndecided(loss_mean="micro_batches")
    apart = step_of(gradient_accumulation_steps=2, undecided=own).optimizer_steps[0]
    means = [float(each.policy_losses[each.mask].mean()) for each in apart.micro_batches]
    assert float(apart.policy_loss) == pytest.approx(sum(means) / 2)
    means = [float(each.value_losses[each.step_mask].mean()) for each in apart.micro_batches]
    assert float(apart.value_loss) == pytest.approx(sum(means) / 2)
    assert float(apart.policy_loss) != pytest.approx(float(whole.policy_loss))


def test_whitening_over_a_batch_or_over_each_rank() -> None:
    batch = step_of(world_size=2, whiten_rewards=True).experience
    mask = batch.tokens.completion_mask
    assert float(batch.advantages[mask].mean()) == pytest.approx(0, abs=1e-12)
    assert float(batch.advantages[mask].var(correction=0)) == pytest.approx(1)
    assert float(batch.whitened_rewards[mask].mean()) == pytest.approx(float(batch.rewards[mask].mean()))
    assert float(batch.whitened_rewards[mask].var(correction=0)) == pytest.approx(1)
    estimates = reference.advantage_estimates(batch.whitened_rewards, batch.values, mask, gamma=1.0, lam=0.95)
    assert torch.equal(batch.returns, estimates + batch.values)
    rank = step_of(world_size=2, undecided=PPOUndecided(whiten_over="rank")).experience
    for rows in (slice(0, 2), slice(2, 4)):
        own = rank.advantages[rows][mask[rows]]
        assert float(own.mean()) == pytest.approx(0, abs=1e-12)
        assert float(own.var(correction=0)) == pytest.approx(1)


def test_a_score_has_a_step_of_its_own_by_the_longest_response_of_its_rank() -> None:
    undecided = PPOUndecided(score_at="after_last_token")
    for ranks, expected in ((1, [3, 2, 4, 3]), (2, [2, 2, 4, 3])):
        settings = ppo_settings_of(world_size=ranks, undecided=undecided)
        made = reference.ppo_step(random_bigrams(), random_values(), OTHER, settings).experience
        assert made.step_mask.sum(1).tolist() == expected


def test_a_training_is_pytorchs_optimizer_on_its_clipped_gradients() -> None:
    settings = ppo_settings_of(**ADAMW, num_ppo_epochs=2, num_mini_batches=2)
    policy, values = random_bigrams(), random_values()
    batches = reference.ppo_train(policy, values, [EPISODES, OTHER], settings)
    steps = [each for batch in batches for each in batch.optimizer_steps]
    assert len(steps) == 8
    assert_pytorch_steps_so({"policy.table": policy.table, "value_model.table": values.table}, steps)


def test_the_schedule_counts_optimizer_steps_or_batches() -> None:
    def rates(**undecided: Any) -> tuple[list[list[float]], list[float]]:
        settings = ppo_settings_of(
            learning_rate=0.8, num_ppo_epochs=2, num_total_batches=4, undecided=PPOUndecided(**undecided)
        )
        batches = reference.ppo_train(random_bigrams(), random_values(), [EPISODES, OTHER], settings)
        return [[each.learning_rate for each in batch.optimizer_steps] for batch in batches], [
            batch.logs["lr"] for batch in batches
        ]

    assert rates() == ([[0.8, pytest.approx(0.7)], [pytest.approx(0.6), 0.5]], [pytest.approx(0.7), 0.5])
    assert rates(schedule_steps="batches") == ([[0.8, 0.8], [pytest.approx(0.6)] * 2], [0.8, pytest.approx(0.6)])
    assert rates(learning_rate_logged="next")[1] == [pytest.approx(0.6), 0.4]
    assert rates(schedule_steps="batches", learning_rate_logged="next")[1] == [pytest.approx(0.6), 0.4]


def test_models_stay_as_they_are_and_what_they_share_stays_shared() -> None:
    policy, values, other = random_bigrams(), random_values(), random_bigrams(seed=1)
    reference.ppo_train(policy, values, [EPISODES] * 2, ppo_settings_of(), reference_model=other)
    assert torch.equal(policy.table, random_bigrams().table)
    assert torch.equal(values.table, random_values().table)
    assert torch.equal(other.table, random_bigrams(seed=1).table)

    class Shared(torch.nn.Module):
        def __init__(self, inner: Bigrams) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids, attention_mask)[..., 0]

    step = reference.ppo_step(policy, Shared(policy), EPISODES, ppo_settings_of())
    assert set(step.optimizer_steps[0].weights) == {"policy.table"}


def test_rows_alone_and_padded_batches_agree_on_a_real_model() -> None:
    from transformers import AutoModelForCausalLM

    model = tiny.qwen2(initializer_range=0.3).model
    head = torch.nn.Linear(model.config.hidden_size, 1)

    class Scored(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = AutoModelForCausalLM.from_config(model.config).model.eval()
            self.head = head

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)

    values = Scored()
    for own in ("last_token", "after_last_token"):
        settings = ppo_settings_of(stop_token_id=1, undecided=PPOUndecided(score_at=own))
        alone, padded = (reference.ppo_step(model, values, EPISODES, settings, padded=each) for each in (False, True))
        for (name, left), (other, right) in zip(reference.quantities(alone), reference.quantities(padded), strict=True):
            assert name == other
            torch.testing.assert_close(
                left, right, rtol=1e-3, atol=1e-4, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert float(alone.optimizer_steps[0].grad_norm) > 0.1


@pytest.mark.parametrize(
    "settings, quantity",
    [
        ({"stop_token_id": 6}, "experience.tokens.completion_mask"),
        ({"eos_token_id": 7}, "experience.has_eos"),
        ({"undecided": PPOUndecided(eos_must_end=True)}, "experience.has_eos"),
        ({"temperature": 0.5}, "experience.logprobs"),
        ({"undecided": PPOUndecided(entropy_at_temperature=False), "temperature": 0.9}, "experience.logprobs"),
        ({"undecided": PPOUndecided(score_at="after_last_token")}, "experience.step_mask"),
        ({"missing_eos_penalty": 1.0}, "experience.penalised_scores"),
        ({"kl_estimator": "k3"}, "experience.kl"),
        ({"kl_coef": 0.5}, "experience.rewards"),
        ({"whiten_rewards": True}, "experience.whitened_rewards"),
        ({"gamma": 0.5}, "experience.returns"),
        ({"lam": 0.5}, "experience.returns"),
        ({"undecided": PPOUndecided(whiten_correction=1)}, "experience.advantages"),
        ({"undecided": PPOUndecided(value_loss_scale=1.0)}, "optimizer_steps[0].micro_batches[0].value_losses"),
        ({"undecided": PPOUndecided(clipped_by="range")}, "optimizer_steps[1].micro_batches[0].policy_clipped"),
        ({"cliprange": 0.001}, "optimizer_steps[1].micro_batches[0].policy_losses"),
        ({"cliprange_value": 0.001}, "optimizer_steps[1].micro_batches[0].value_losses"),
        ({"vf_coef": 0.5}, "optimizer_steps[0].loss"),
        ({"max_grad_norm": 0.01}, "optimizer_steps[0].clipped_gradients[policy.table]"),
        ({"learning_rate": 0.2}, "optimizer_steps[0].learning_rate"),
        ({"undecided": PPOUndecided(schedule_steps="batches")}, "optimizer_steps[1].learning_rate"),
        ({"optim": "adamw_torch"}, "optimizer_steps[0].weights[policy.table]"),
        ({"undecided": PPOUndecided(objective_entropy="exact")}, "logs[objective/entropy]"),
        ({"undecided": PPOUndecided(non_score_reward_sign=1)}, "logs[objective/non_score_reward]"),
        ({"undecided": PPOUndecided(learning_rate_logged="next")}, "logs[lr]"),
    ],
    ids=str,
)
def test_each_setting_first_changes_what_it_is_for(settings: dict[str, Any], quantity: str) -> None:
    base = {"num_ppo_epochs": 2, "num_mini_batches": 2, "learning_rate": 0.5, "cliprange": 0.01, "max_grad_norm": None}
    pairs = zip(
        reference.quantities(step_of(**base)), reference.quantities(step_of(**{**base, **settings})), strict=True
    )
    assert next(left[0] for left, right in pairs if not is_equal(left[1], right[1])) == quantity


def test_what_cannot_be_right_is_refused() -> None:
    def run(episodes: Episodes = EPISODES, **settings: Any) -> PPOStep:
        return reference.ppo_step(random_bigrams(), random_values(), episodes, ppo_settings_of(**settings))

    with pytest.raises(ValueError, match="a response has 4 tokens, response_length=3"):
        run(response_length=3)
    with pytest.raises(ValueError, match="give either a reward model or the scores of the responses"):
        run(Episodes(EPISODES.queries, EPISODES.responses))
    with pytest.raises(ValueError, match="4 responses cannot be shared by 2 ranks in 3 mini-batches of 1 micro-batch"):
        run(world_size=2, num_mini_batches=3)
    with pytest.raises(ValueError, match="4 queries, 1 responses, 4 scores"):
        Episodes(EPISODES.queries, [[1]], EPISODES.scores)
    settings = ppo_settings_of(world_size=2)
    for layout, text in (
        ([[[[[0, 2], [1, 3]]]]], r"epoch 0: rank 0 has rows \[0, 2\] of 4 on 2 ranks"),
        ([[[[[0, 1], [2]]]]], r"epoch 0: rank 1 has rows \[2\] of 4 on 2 ranks"),
        ([[[[[0], [2]], [[1], [3]]]]], r"the layout has 1 epochs of \{1\} mini-batches of \{2\} micro-batches"),
    ):
        with pytest.raises(ValueError, match=text):
            reference.ppo_step(random_bigrams(), random_values(), EPISODES, settings, layout=layout)
    for wrong, text in (
        ({"kl_estimator": "k2"}, "kl_estimator='k2'; choose one of 'k1', 'k3'"),
        ({"temperature": 0.0}, "temperature=0.0 is not positive"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty=-1.0, but it must be a positive value"),
        ({"non_eos_penalty": True}, "non_eos_penalty is of responses without stop_token_id, which is not set"),
        ({"num_ppo_epochs": 0}, "num_ppo_epochs=0 is not positive"),
        ({"optim": "lion"}, "optim='lion'; choose one of"),
    ):
        with pytest.raises(ValueError, match=text):
            PPOSettings(**wrong)
    with pytest.raises(ValueError, match="score_at='end'; choose one of 'last_token', 'after_last_token'"):
        PPOUndecided(score_at="end")
    with pytest.raises(ValueError, match=r"Bigrams gives \(6, 8\) for \(6,\) tokens"):
        reference.ppo_step(random_bigrams(), random_bigrams(), EPISODES, ppo_settings_of())


def test_a_batch_of_one_micro_batch_has_no_variance_over_micro_batches() -> None:
    step = step_of(undecided=PPOUndecided(ratio_var_over="micro_batches"))
    assert math.isnan(step.logs["val/ratio_var"])
    assert reference.ppo_step(uniform(8), random_values(), EPISODES, ppo_settings_of()).logs["val/ratio_var"] == 0
