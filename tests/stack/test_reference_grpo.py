"""Whole steps of the reference: by hand on a model that can be worked out, and by what must hold for any model."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference, tiny
from pytest_trlcompat.reference import GRPOSettings, GRPOStep, Rollout, Undecided

from .reference_models import Bigrams, random_bigrams, uniform

EXACT = Undecided(std_epsilon=0.0)
PAIR = Rollout(prompts=[[2], [2]], completions=[[3, 1], [2]], rewards=[[1.0], [0.0]])
"""After the prompt 2: 3 and the end of sequence 1; and 2, truncated."""
HALF = math.sqrt(0.5)
"""The advantage of the better of two: 0.5 over the standard deviation sqrt(2 * 0.5^2 / 1)."""
ROWS = Rollout(
    prompts=[[2, 3]] * 4 + [[4]] * 4,
    completions=[[5, 6, 1], [7, 1], [3, 4, 5, 6], [1], [6, 6, 1], [5, 4, 3, 2], [2, 1], [7, 7, 7, 1]],
    rewards=[[1.0, 0.5], [0.0, 2.0], [2.0, None], [0.5, 1.0], [3.0, 0.0], [1.0, 1.0], [None, 2.0], [0.0, 0.0]],
)
EQUAL = Rollout(prompts=ROWS.prompts, completions=[[2 + row % 3, 7, 1] for row in range(8)], rewards=ROWS.rewards)


def settings_of(**settings: Any) -> GRPOSettings:
    level = {"importance_sampling_level": "sequence"} if settings.get("loss_type") == "luspo" else {}
    base = {"num_generations": 4, "max_completion_length": 4, "optim": "sgd", "learning_rate": 0.1}
    return GRPOSettings(**{**base, **level, **settings})


def test_a_step_by_hand() -> None:
    settings = settings_of(
        num_generations=2, learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=None, undecided=EXACT
    )
    step = reference.grpo_step(uniform(), PAIR, settings)
    (generation,), (batch,) = step.generations, step.micro_batches
    assert generation.advantages.advantages.tolist() == pytest.approx([HALF, -HALF])
    assert generation.old_logprobs.tolist() == [pytest.approx([-math.log(4)] * 2), pytest.approx([-math.log(4), 0])]
    assert generation.reference_logprobs is None
    assert batch.logprobs.tolist() == generation.old_logprobs.tolist()
    assert batch.entropies.tolist() == [pytest.approx([math.log(4)] * 2), pytest.approx([math.log(4), 0])]
    assert batch.weights.tolist() == [[1, 1], [1, 1]]
    assert batch.policy_losses.tolist() == [pytest.approx([-HALF] * 2), pytest.approx([HALF] * 2)]
    share = 1 / 3  # three tokens count
    assert batch.shares.tolist() == [pytest.approx([share] * 2), pytest.approx([share, 0])]
    assert float(step.loss) == pytest.approx(-HALF / 3)
    # Each token's log-probability is moved by g = HALF / 3: in row 2 up at 3 and down at 2, the rest cancels; in row 3
    # by 1 - 1/4 at 1, and by -1/4 elsewhere.
    g = HALF / 3
    gradient = torch.zeros(4, 4, dtype=torch.float64)
    gradient[2] = torch.tensor([0, 0, g, -g])
    gradient[3] = torch.tensor([g / 4, -3 * g / 4, g / 4, g / 4])
    assert torch.allclose(step.gradients["table"], gradient)
    assert float(step.grad_norm) == pytest.approx(g * math.sqrt(2 + 9 / 16 + 3 / 16))
    assert torch.allclose(step.weights["table"], -0.5 * gradient)
    assert step.logs == pytest.approx(
        {
            "loss": -HALF / 3,
            "grad_norm": g * math.sqrt(2.75),
            "learning_rate": 0.5,
            "num_tokens": 2 + 3,
            "completions/mean_length": 1.5,
            "completions/min_length": 1,
            "completions/max_length": 2,
            "completions/mean_terminated_length": 2,
            "completions/min_terminated_length": 2,
            "completions/max_terminated_length": 2,
            "completions/clipped_ratio": 0.5,
            "rewards/reward_0/mean": 0.5,
            "rewards/reward_0/std": HALF,
            "reward": 0.5,
            "reward_std": HALF,
            "frac_reward_zero_std": 0,
            "entropy": math.log(4),
            "clip_ratio/low_mean": 0,
            "clip_ratio/low_min": 0,
            "clip_ratio/high_mean": 0,
            "clip_ratio/high_max": 0,
            "clip_ratio/region_mean": 0,
        }
    )


@pytest.mark.parametrize("corrected", [False, True])
def test_the_kl_term_by_hand(corrected: bool) -> None:
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[2, 3] = math.log(3)  # after 2: 1/6, 1/6, 1/6, 1/2
    settings = settings_of(num_generations=2, beta=0.3, use_bias_correction_kl=corrected, undecided=EXACT)
    step = reference.grpo_step(uniform(), PAIR, settings, reference_model=Bigrams(table))
    # r = 2 for the token 3, 1 for the end of sequence, 2/3 for the token 2.
    up, down = 2 - math.log(2) - 1, 2 / 3 - math.log(2 / 3) - 1
    kl = step.micro_batches[0].kl
    assert kl is not None
    assert [kl[0, 0].item(), kl[0, 1].item(), kl[1, 0].item()] == pytest.approx([up, 0, down])
    assert step.logs["kl"] == pytest.approx((up + down) / 3)
    assert float(step.loss) == pytest.approx(-HALF / 3 + 0.3 * (up + down) / 3)
    # In the row of 2, the derivative with respect to log pi is -A + beta (1 - r), and + beta k3 where it is corrected.
    more = (up, down) if corrected else (0.0, 0.0)
    first = (-HALF + 0.3 * (1 - 2 + more[0])) / 3
    second = (HALF + 0.3 * (1 - 2 / 3 + more[1])) / 3
    both = (first + second) / 4
    assert step.gradients["table"][2].tolist() == pytest.approx([-both, -both, second - both, first - both])


def test_the_reference_model_is_the_untrained_policy_by_default() -> None:
    steps = reference.grpo_train(random_bigrams(), [ROWS, ROWS], settings_of(beta=0.1, learning_rate=1.0))
    assert steps[0].logs["kl"] == 0
    assert steps[1].logs["kl"] > 1e-4


def test_a_temperature_divides_the_logits() -> None:
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[2, 3] = 2 * math.log(3)
    settings = settings_of(num_generations=2, temperature=2.0)
    batch = reference.grpo_step(Bigrams(table), PAIR, settings).micro_batches[0]
    assert batch.logprobs[0, 0].item() == pytest.approx(math.log(1 / 2))  # 3 / (1 + 1 + 1 + 3)
    assert batch.entropies[0, 0].item() == pytest.approx(-(0.5 * math.log(0.5) + 3 / 6 * math.log(1 / 6)))
    other = settings_of(num_generations=2, temperature=2.0, undecided=Undecided(entropy_at_temperature=False))
    batch = reference.grpo_step(Bigrams(table), PAIR, other).micro_batches[0]
    assert batch.entropies[0, 0].item() == pytest.approx(-(9 / 12 * math.log(9 / 12) + 3 / 12 * math.log(1 / 12)))


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")


def off_policy(**settings: Any) -> tuple[Bigrams, Bigrams, Bigrams, GRPOSettings]:
    """A policy, the one that sampled, not too far away, a reference model, and settings under which all terms count."""
    old = random_bigrams()
    policy = Bigrams(old.table.detach() + 0.15 * random_bigrams(seed=1).table.detach())
    base = {"beta": 0.2, "entropy_coef": 0.05, "temperature": 0.8, "epsilon": 0.1, "epsilon_high": 0.15}
    return policy, old, random_bigrams(seed=2), settings_of(**{**base, **settings})


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(
    "loss_type, level",
    [
        *itertools.product(["grpo", "bnpo", "dr_grpo", "dapo", "sapo"], ["token", "sequence"]),
        ("luspo", "sequence"),
    ],
)
def test_gradients_are_finite_differences_of_the_loss(loss_type: str, corrected: bool, level: str) -> None:
    policy, old, other, settings = off_policy(
        loss_type=loss_type, use_bias_correction_kl=corrected, importance_sampling_level=level
    )
    settings = replace(settings, world_size=2)
    direction = random_bigrams(seed=3).table.detach()

    def loss(distance: float) -> GRPOStep:
        moved = Bigrams(policy.table.detach() + distance * direction)
        return reference.grpo_step(moved, ROWS, settings, old_model=old, reference_model=other)

    expected = (loss(1e-6).loss - loss(-1e-6).loss) / 2e-6
    step = loss(0.0)
    assert float((step.gradients["table"] * direction).sum()) == pytest.approx(float(expected), rel=1e-6)
    assert abs(float(expected)) > 1e-3
    if loss_type != "sapo":  # which clips nothing
        assert 0 < step.logs["clip_ratio/region_mean"] < 1


@pytest.mark.parametrize("loss_type", ["cispo", "vespo"])
def test_gradients_where_weights_have_none(loss_type: str) -> None:
    """The gradient is that of the weighted log-likelihood, with the weights of the policy as it is."""
    policy, old, _, settings = off_policy(loss_type=loss_type, beta=0.0, entropy_coef=0.0, epsilon_high=1.1)
    direction = random_bigrams(seed=3).table.detach()
    step = reference.grpo_step(policy, ROWS, settings, old_model=old)
    generation, batch = step.generations[0], step.micro_batches[0]
    advantages = generation.advantages.advantages[:, None]
    if loss_type == "cispo":
        weights = batch.weights.clamp(max=1.1)
    else:
        whole = (batch.logprobs - generation.old_logprobs).sum(1, keepdim=True).exp()  # 0 beyond the end
        good, bad = whole**2 * (3 * (1 - whole)).exp(), whole**3 * (2 * (1 - whole)).exp()
        weights = torch.where(advantages > 0, good, bad)

    def likelihood(distance: float) -> float:
        moved = Bigrams(policy.table.detach() + distance * direction)
        scores = reference.score_tokens(moved, generation.tokens, temperature=settings.temperature)
        return float((-batch.shares * weights * advantages * scores.logprobs.detach()).sum())

    expected = (likelihood(1e-6) - likelihood(-1e-6)) / 2e-6
    assert float((step.gradients["table"] * direction).sum()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_how_a_step_is_shared_changes_nothing_but_for_bnpo(loss_type: str) -> None:
    policy, old, other, whole = off_policy(loss_type=loss_type)
    _, _, _, shared = off_policy(loss_type=loss_type, world_size=2, gradient_accumulation_steps=2)
    one, many = (
        reference.grpo_step(policy, ROWS, each, old_model=old, reference_model=other) for each in (whole, shared)
    )
    assert (len(one.micro_batches), len(many.micro_batches)) == (1, 4)
    is_same = torch.allclose(one.gradients["table"], many.gradients["table"], rtol=1e-10)
    assert is_same == (loss_type != "bnpo")
    assert math.isclose(one.loss, many.loss, rel_tol=1e-10) == (loss_type != "bnpo")
    names = set(one.logs) - {"loss", "grad_norm", "policy_loss"}
    assert {name: one.logs[name] for name in names} == pytest.approx({name: many.logs[name] for name in names})


def test_losses_coincide_for_equal_lengths() -> None:
    policy, old, other, _ = off_policy()
    found = {}
    for loss_type in ("grpo", "bnpo", "dapo", "dr_grpo"):
        settings = off_policy(loss_type=loss_type, max_completion_length=3, gradient_accumulation_steps=2)[3]
        found[loss_type] = float(
            reference.grpo_step(policy, EQUAL, settings, old_model=old, reference_model=other).loss
        )
    assert found == pytest.approx(dict.fromkeys(found, found["dapo"]))


def test_groups_of_equal_rewards_teach_nothing() -> None:
    rollout = Rollout(prompts=ROWS.prompts, completions=ROWS.completions, rewards=[[3.0]] * 8)
    step = reference.grpo_step(random_bigrams(), rollout, settings_of())
    assert not step.gradients["table"].any()
    assert step.logs["frac_reward_zero_std"] == 1


def test_only_excluded_completions_lose_their_gradient() -> None:
    settings = settings_of(num_generations=2, mask_truncated_completions=True, undecided=EXACT)
    step = reference.grpo_step(uniform(), PAIR, settings)
    g = HALF / 2  # two tokens count; only the first completion moves anything
    assert step.gradients["table"][2].tolist() == pytest.approx([g / 4, g / 4, g / 4, -3 * g / 4])
    assert step.logs["completions/mean_length"] == 1.5
    assert step.logs["completions/clipped_ratio"] == 0.5


def test_tokens_left_out_of_the_policy_term_stay_in_the_kl_term_and_the_divisor() -> None:
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[3, 3] = 1.0  # after 3 the entropy is lower: the end of sequence leaves the policy term
    settings = settings_of(num_generations=2, top_entropy_quantile=0.5, beta=0.5, undecided=EXACT)
    step = reference.grpo_step(Bigrams(table), PAIR, settings, reference_model=uniform())
    batch = step.micro_batches[0]
    assert batch.kl is not None
    assert batch.policy_mask.tolist() == [[True, False], [True, False]]
    assert batch.shares[0].tolist() == pytest.approx([1 / 3, 1 / 3])
    assert float(step.loss) == pytest.approx(0.5 * batch.kl[0, 1].item() / 3)  # -HALF and HALF cancel
    assert batch.kl[0, 1].item() > 0.01


def test_the_entropy_threshold_is_over_all_ranks_or_one() -> None:
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[3, 3], table[2, 2] = 1.0, 2.0
    found = {}
    for over in ("ranks", "rank"):
        settings = settings_of(
            num_generations=2, world_size=2, top_entropy_quantile=0.0, undecided=Undecided(entropy_threshold_over=over)
        )
        step = reference.grpo_step(Bigrams(table), PAIR, settings)
        found[over] = [each.policy_mask.any().item() for each in step.micro_batches]
    assert found == {"ranks": [True, False], "rank": [True, True]}


def test_bad_completions_that_the_policy_left_keep_their_kl_term() -> None:
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[2, 2] = -3.0  # the second completion, the worse one, is much less likely than it was
    settings = settings_of(num_generations=2, off_policy_mask_threshold=0.5, beta=0.5, undecided=EXACT)
    step = reference.grpo_step(Bigrams(table), PAIR, settings, old_model=uniform(), reference_model=uniform())
    assert step.micro_batches[0].policy_mask.tolist() == [[True, True], [False, False]]
    kl, ratio = step.micro_batches[0].kl, step.micro_batches[0].weights
    assert kl is not None
    clipped = min(ratio[0, 0].item(), 1.2) * HALF + HALF
    corrected = float((kl * ratio)[step.micro_batches[0].mask].sum())
    assert float(step.loss) == pytest.approx((-clipped + 0.5 * corrected) / 3)


def test_the_entropy_bonus_is_a_mean_over_tokens_for_every_loss() -> None:
    for loss_type in LOSSES:
        plain, bonus = (
            reference.grpo_step(random_bigrams(), ROWS, settings_of(loss_type=loss_type, entropy_coef=coefficient))
            for coefficient in (0.0, 0.5)
        )
        assert float(bonus.loss - plain.loss) == pytest.approx(-0.5 * plain.logs["entropy"])
        assert bonus.logs["policy_loss"] == pytest.approx(float(plain.loss))
        assert bonus.logs["entropy_coef"] == 0.5
        assert "policy_loss" not in plain.logs


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
    settings = settings_of(
        optim="adamw_torch",
        learning_rate=0.3,
        adam_beta1=0.5,
        adam_beta2=0.7,
        adam_epsilon=1e-3,
        weight_decay=0.2,
        max_grad_norm=0.1,
        lr_scheduler_type="cosine",
    )
    steps = reference.grpo_train(random_bigrams(), [ROWS] * 3, settings)
    model = random_bigrams()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.3, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.2)
    for index, step in enumerate(steps):
        model.table.grad = step.gradients["table"].clone()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert torch.allclose(norm, step.grad_norm, rtol=1e-12)
        theirs.param_groups[0]["lr"] = 0.3 * (1 + math.cos(math.pi * index / 3)) / 2
        theirs.step()
        assert torch.allclose(model.table, step.weights["table"], rtol=1e-12)


def test_the_reference_model_is_synchronised() -> None:
    settings = settings_of(
        beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=1.0, learning_rate=1.0
    )
    steps = reference.grpo_train(random_bigrams(), [ROWS] * 3, settings)
    assert [step.logs["kl"] > 0 for step in steps] == [False, True, False]


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


def test_rows_alone_and_padded_batches_agree_on_a_real_model() -> None:
    model = tiny.qwen2(initializer_range=0.3).model
    settings = settings_of(beta=0.1)
    alone, padded = (reference.grpo_step(model, ROWS, settings, padded=each) for each in (False, True))
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
