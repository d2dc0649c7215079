"""Single steps of the reference: by hand on a model that can be worked out, and by what must hold for any model."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference
from pytest_trlcompat.reference import GRPOSettings, GRPOStep, Rollout, Undecided

from .reference_models import EQUAL, EXACT, ROWS, Bigrams, random_bigrams, settings_of, uniform

PAIR = Rollout(prompts=[[2], [2]], completions=[[3, 1], [2]], rewards=[[1.0], [0.0]])
"""After the prompt 2: 3 and the end of sequence 1; and 2, truncated."""
HALF = math.sqrt(0.5)
"""The advantage of the better of two: 0.5 over the standard deviation sqrt(2 * 0.5^2 / 1)."""


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
