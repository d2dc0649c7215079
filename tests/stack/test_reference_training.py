"""Trainings and evaluations of the reference, what differs first between two steps, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference, tiny
from pytest_trlcompat.reference import Rollout, Undecided

from .reference_models import ADAMW, EQUAL, EXACT, ROWS, Bigrams, assert_pytorch_steps_so, random_bigrams, settings_of


def test_the_reference_model_is_the_untrained_policy_by_default() -> None:
    steps = reference.grpo_train(random_bigrams(), [ROWS, ROWS], settings_of(beta=0.1, learning_rate=1.0))
    assert steps[0].logs["kl"] == 0
    assert steps[1].logs["kl"] > 1e-4


def test_the_entropy_coefficient_is_updated_each_step() -> None:
    settings = settings_of(
        use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=10.0, entropy_coef_delta=0.2, max_steps=9
    )
    steps = reference.grpo_train(random_bigrams(), [ROWS] * 3, settings)
    assert [step.entropy_coef for step in steps] == pytest.approx([0.1, 0.3, 0.5])
    assert all(step.loss < step.policy_loss for step in steps)
    above = reference.grpo_train(
        random_bigrams(), [ROWS] * 2, settings_of(use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=0.0)
    )
    assert [step.entropy_coef for step in above] == pytest.approx([0.1, 0.095])
    assert all(step.loss == step.policy_loss for step in above)


def test_the_entropy_that_decides_may_be_that_of_the_step_before() -> None:
    undecided = Undecided(entropy_control_by="previous_step", entropy_coef_logged="next")
    settings = settings_of(use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=10.0, undecided=undecided)
    steps = reference.grpo_train(random_bigrams(), [ROWS] * 2, settings)
    assert steps[0].loss == steps[0].policy_loss  # there was none before
    assert float(steps[1].policy_loss - steps[1].loss) == pytest.approx(0.105 * steps[1].logs["entropy"])
    assert [step.logs["entropy_coef"] for step in steps] == pytest.approx([0.105, 0.11])


def test_iterations_keep_the_policy_that_sampled() -> None:
    steps = reference.grpo_train(random_bigrams(), [ROWS, ROWS], settings_of(num_iterations=2, learning_rate=2.0))
    assert len(steps) == 4
    first, second, third, _ = steps
    assert first.generations[0] is second.generations[0]
    assert first.logs["num_tokens"] == second.logs["num_tokens"] == third.logs["num_tokens"] / 2
    assert set(first.micro_batches[0].weights.unique().tolist()) == {1.0}
    assert second.micro_batches[0].weights.std() > 0.01
    # The second rollout is scored by the policy after two steps.
    assert not torch.allclose(third.generations[0].old_logprobs, first.generations[0].old_logprobs)
    assert set(third.micro_batches[0].weights.unique().tolist()) == {1.0}
    assert "reward" in first.logs
    assert "reward" not in second.logs


def test_steps_of_a_generation_and_of_several() -> None:
    halves = reference.grpo_train(random_bigrams(), [ROWS], settings_of(steps_per_generation=2, learning_rate=2.0))
    assert [step.micro_batches[0].rows for step in halves] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert halves[1].micro_batches[0].weights.std() > 0.01
    # dapo divides by the tokens of the step's own micro-batches: 3 + 2 + 4 + 1, and 3 + 4 + 2 + 4.
    assert [float(step.micro_batches[0].shares.max()) for step in halves] == pytest.approx([1 / 10, 1 / 13])
    generation = settings_of(steps_per_generation=2, undecided=Undecided(active_tokens_of="generation"))
    halves = reference.grpo_train(random_bigrams(), [ROWS], generation)
    assert [float(step.micro_batches[0].shares.max()) for step in halves] == pytest.approx([2 / 23] * 2)
    (both,) = reference.grpo_train(
        random_bigrams(), [ROWS, EQUAL], settings_of(steps_per_generation=1, gradient_accumulation_steps=2)
    )
    assert [each.generation for each in both.micro_batches] == [0, 1]
    assert float(both.micro_batches[0].shares.max()) == pytest.approx(1 / (23 + 24))
    assert both.logs["completions/mean_length"] == pytest.approx((23 / 8 + 3) / 2)


def test_ranks_have_contiguous_rows_by_default() -> None:
    found = reference.contiguous_layout(8, world_size=2, micro_batches=2)
    assert found == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_training_is_its_steps() -> None:
    settings = settings_of(optim="adamw_torch", weight_decay=0.1, warmup_steps=0.5, max_steps=4, learning_rate=0.4)
    steps = reference.grpo_train(random_bigrams(), [ROWS] * 3, settings)
    assert [step.learning_rate for step in steps] == pytest.approx([0.0, 0.2, 0.4])
    assert [step.logs["learning_rate"] for step in steps] == pytest.approx([0.0, 0.2, 0.4])
    assert torch.equal(steps[0].weights["table"], random_bigrams().table)
    model = Bigrams(steps[1].weights["table"])
    assert torch.allclose(
        reference.grpo_step(model, ROWS, settings).gradients["table"], steps[2].gradients["table"], rtol=1e-12
    )
    other = Undecided(learning_rate_logged="next")
    steps = reference.grpo_train(random_bigrams(), [ROWS] * 3, settings_of(**{**vars(settings), "undecided": other}))
    assert [step.logs["learning_rate"] for step in steps] == pytest.approx([0.2, 0.4, 0.2])


def test_a_training_is_pytorchs_optimizer_on_its_clipped_gradients() -> None:
    steps = reference.grpo_train(random_bigrams(), [ROWS] * 3, settings_of(**ADAMW))
    assert_pytorch_steps_so({"table": random_bigrams().table}, steps)


def test_the_reference_model_is_synchronised() -> None:
    settings = settings_of(
        beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=1.0, learning_rate=1.0
    )
    steps = reference.grpo_train(random_bigrams(), [ROWS] * 3, settings)
    assert [step.logs["kl"] > 0 for step in steps] == [False, True, False]


@pytest.mark.parametrize("scored_at, apart", [("generation", True), ("step", False)])
def test_a_synchronised_reference_model_scores_a_generation_once_or_at_each_step(scored_at: str, apart: bool) -> None:
    undecided = Undecided(reference_scored_at=scored_at)
    settings = settings_of(
        beta=0.1,
        num_iterations=2,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=1.0,
        learning_rate=1.0,
        undecided=undecided,
    )
    first, second = reference.grpo_train(random_bigrams(), [ROWS], settings)
    assert float(first.logs["kl"]) == pytest.approx(0, abs=1e-9)
    assert (abs(second.logs["kl"]) > 1e-6) is apart  # the reference model is the policy of the first step's end


def test_models_stay_as_they_are() -> None:
    policy, other = random_bigrams(), random_bigrams(seed=1)
    reference.grpo_train(policy, [ROWS] * 2, settings_of(beta=0.1), reference_model=other)
    assert torch.equal(policy.table, random_bigrams().table)
    assert torch.equal(other.table, random_bigrams(seed=1).table)
    assert policy.table.grad is None


def test_frozen_parameters_have_no_gradient() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)).double()
    model[0].requires_grad_(False)

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids)

    step = reference.grpo_step(Wrapped(), ROWS, settings_of())
    assert set(step.gradients) == set(step.weights) == {"inner.1.weight", "inner.1.bias"}


def test_an_evaluation_is_the_loss_of_a_policy_that_has_just_sampled() -> None:
    settings = settings_of(num_generations=8, num_generations_eval=4, beta=0.1, undecided=EXACT)
    found = reference.grpo_evaluate(random_bigrams(), [ROWS, EQUAL], settings, reference_model=random_bigrams(seed=1))
    each = settings_of(beta=0.1, undecided=EXACT)
    steps = [
        reference.grpo_step(random_bigrams(), rows, each, reference_model=random_bigrams(seed=1))
        for rows in (ROWS, EQUAL)
    ]
    assert found.losses.tolist() == pytest.approx([float(step.loss) for step in steps])
    assert found.logs["eval_loss"] == pytest.approx(float(sum(step.loss for step in steps)) / 2)
    for name in ("reward", "kl", "entropy", "completions/mean_length", "frac_reward_zero_std"):
        assert found.logs[f"eval_{name}"] == pytest.approx(sum(step.logs[name] for step in steps) / 2)
    assert not any(name in found.logs for name in ("eval_grad_norm", "eval_learning_rate", "reward"))
    with pytest.raises(ValueError, match="there is nothing to evaluate"):
        reference.grpo_evaluate(random_bigrams(), [], settings)


def is_equal(left: Any, right: Any) -> bool:
    one, other = (torch.as_tensor(each).double().nan_to_num(-1.0) for each in (left, right))
    return torch.equal(one, other)


def test_the_first_difference_can_be_found() -> None:
    one, other = (
        reference.grpo_step(random_bigrams(), ROWS, settings_of(beta=beta, temperature=temperature))
        for beta, temperature in ((0.1, 1.0), (0.1, 0.5))
    )
    pairs = list(zip(reference.quantities(one), reference.quantities(other), strict=True))
    assert [left[0] for left, _ in pairs] == [right[0] for _, right in pairs]
    differing = [left[0] for left, right in pairs if not is_equal(left[1], right[1])]
    assert differing[0] == "generations[0].old_logprobs"
    names = [left[0] for left, _ in pairs]
    assert names.index("micro_batches[0].logprobs") < names.index("loss") < names.index("gradients[table]")
    assert names[-1].startswith("logs[")


def with_tools(rows: reference.Rollout) -> reference.Rollout:
    """Completions with the result of a tool, and a turn of another length behind it."""
    completions = [[*each, 1, 9, 8, 1, *[7] * row, 1] for row, each in enumerate(rows.completions)]
    sampled = [
        [*[True] * (len(each) + 1), *[False] * 3, *[True] * (row + 1)] for row, each in enumerate(rows.completions)
    ]
    return dataclasses.replace(rows, completions=completions, sampled=sampled)


@pytest.mark.parametrize("rows", [ROWS, with_tools(ROWS)], ids=["plain", "tools"])
def test_rows_alone_and_padded_batches_agree_on_a_real_model(rows: reference.Rollout) -> None:
    model = tiny.qwen2(initializer_range=0.3).model
    settings = settings_of(beta=0.1, max_completion_length=40)
    alone, padded = (reference.grpo_step(model, rows, settings, padded=each) for each in (False, True))
    for (name, left), (other, right) in zip(reference.quantities(alone), reference.quantities(padded), strict=True):
        assert name == other
        torch.testing.assert_close(
            left, right, rtol=1e-3, atol=1e-4, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert float(alone.grad_norm) > 0.1


@pytest.mark.parametrize(
    "settings, quantity",
    [
        ({"reward_weights": (1.0, 3.0)}, "generations[0].advantages.totals"),
        ({"scale_rewards": "batch"}, "generations[0].advantages.advantages"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "generations[0].advantages.advantages"),
        ({"undecided": Undecided(std_correction=0)}, "generations[0].advantages.group_stds"),
        ({"undecided": Undecided(std_epsilon=1.0)}, "generations[0].advantages.advantages"),
        ({"mask_truncated_completions": True}, "generations[0].tokens.loss_mask"),
        ({"max_prompt_length": 1}, "generations[0].tokens.prompt_ids"),
        ({"pad_to_multiple_of": 8}, "generations[0].tokens.prompt_ids"),
        ({"pad_token_id": 7}, "generations[0].tokens.prompt_ids"),
        ({"eos_token_id": 6}, "generations[0].tokens.completion_mask"),
        ({"temperature": 0.5}, "generations[0].old_logprobs"),
        ({"undecided": Undecided(entropy_bonus_mean="micro_batches")}, "loss"),
        ({"adam_epsilon": 1.0}, "weights[table]"),
        ({"weight_decay": 0.5}, "weights[table]"),
        ({"optim": "sgd"}, "weights[table]"),
        ({"max_grad_norm": 0.01}, "clipped_gradients[table]"),
        ({"warmup_steps": 1}, "learning_rate"),
        ({"learning_rate": 0.2}, "learning_rate"),
    ],
    ids=str,
)
def test_each_setting_first_changes_what_it_is_for(settings: dict[str, Any], quantity: str) -> None:
    base = {"beta": 0.1, "entropy_coef": 0.1, "optim": "adamw_torch", "gradient_accumulation_steps": 2}
    one, other = (
        reference.grpo_step(
            random_bigrams(), ROWS, settings_of(**{**base, **each}), reference_model=random_bigrams(8, 1)
        )
        for each in ({}, settings)
    )
    pairs = zip(reference.quantities(one), reference.quantities(other), strict=True)
    assert next(left[0] for left, right in pairs if not is_equal(left[1], right[1])) == quantity


def test_what_cannot_be_right_is_refused() -> None:
    model = random_bigrams()
    with pytest.raises(ValueError, match="rows 0 and 1 are of one group, but have different prompts"):
        reference.grpo_step(model, Rollout([[2], [3]], [[1], [1]], [[0.0], [1.0]]), settings_of(num_generations=2))
    with pytest.raises(ValueError, match="8 completions are no whole groups of 3"):
        reference.grpo_step(model, ROWS, settings_of(num_generations=3))
    with pytest.raises(ValueError, match="8 completions cannot be shared by 3 ranks in 1 micro-batches"):
        reference.grpo_step(model, ROWS, settings_of(world_size=3))
    with pytest.raises(ValueError, match="a completion has 4 tokens, max_completion_length=3"):
        reference.grpo_step(model, ROWS, settings_of(max_completion_length=3))
    with pytest.raises(ValueError, match="the layout has rows .*, the rollout has rows 0 to 7"):
        reference.grpo_step(model, ROWS, settings_of(), layout=[[list(range(7))]])
    with pytest.raises(ValueError, match="micro-batch 0 has rows for 1 ranks, world_size=2"):
        reference.grpo_step(model, ROWS, settings_of(world_size=2), layout=[[list(range(8))]])
    with pytest.raises(ValueError, match="are no whole number of steps of 2"):
        reference.grpo_train(model, [ROWS], settings_of(steps_per_generation=1, gradient_accumulation_steps=2))
    with pytest.raises(ValueError, match="1 prompts, 2 completions, 1 rows of rewards"):
        Rollout([[2]], [[1], [1]], [[0.0]])
    with pytest.raises(ValueError, match=r"different numbers of functions: \[1, 2\]"):
        Rollout([[2], [2]], [[1], [1]], [[0.0], [0.0, 1.0]])
    dropping = torch.nn.Sequential(torch.nn.Dropout(0.1))
    tokens = reference.tokens_of([[2]], [[3]], pad_token_id=0, eos_token_id=1)
    with pytest.raises(ValueError, match="the model drops out at random in 0; call model.eval"):
        reference.score_tokens(dropping.train(), tokens)
