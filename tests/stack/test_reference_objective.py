"""The reference's objective for each token, and its normalisation, by numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_trlcompat import reference
from pytest_trlcompat.reference import GRPOSettings, Undecided

HARD = ("grpo", "bnpo", "dr_grpo", "dapo")


def doubles(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def token_loss(weight: float, advantage: float, **settings: Any) -> tuple[float, float]:
    """The loss of a lone token whose old log-probability is 0, and its derivative with respect to the new one."""
    logprobs = doubles([math.log(weight)]).requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    loss = reference.policy_losses(
        logprobs, torch.zeros_like(logprobs), advantages, mask, GRPOSettings(**settings)
    ).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return float(loss.detach()), float(gradient)


@pytest.mark.parametrize("loss_type", HARD)
@pytest.mark.parametrize(
    "weight, advantage, loss, gradient",
    [
        (1.1, 1.0, -1.1, -1.1),  # within the bounds
        (1.5, 2.0, -2.56, 0.0),  # min(3, 1.28 * 2): clipped above
        (1.5, -2.0, 3.0, 3.0),  # min(-3, -2.56): a bad token that became likelier is never clipped
        (0.5, 2.0, -1.0, -1.0),  # min(1, 1.6): a good token that became less likely neither
        (0.5, -2.0, 1.6, 0.0),  # min(-1, -1.6): clipped below
    ],
)
def test_hard_clipping(loss_type: str, weight: float, advantage: float, loss: float, gradient: float) -> None:
    found = token_loss(weight, advantage, loss_type=loss_type, epsilon=0.2, epsilon_high=0.28)
    assert found == pytest.approx((loss, gradient))


def test_one_epsilon_holds_for_both_bounds() -> None:
    assert token_loss(1.5, 1.0, epsilon=0.25) == pytest.approx((-1.25, 0.0))


@pytest.mark.parametrize(
    "weight, advantage, loss, gradient",
    [
        (5.0, -2.0, 8.0, 0.0),  # min(min(5, 4) * -2, 1.2 * -2): the second bound of bad tokens
        (3.0, -2.0, 6.0, 6.0),  # below delta
        (5.0, 2.0, -2.4, 0.0),  # good tokens are clipped as ever
    ],
)
def test_two_sided_clipping(weight: float, advantage: float, loss: float, gradient: float) -> None:
    assert token_loss(weight, advantage, delta=4.0) == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    "weight, advantage, loss, gradient",
    [
        (6.0, 2.0, -5 * 2 * math.log(6), -10.0),  # the weight is clipped at 5, not at 1 + 5; the token still learns
        (0.5, -2.0, 0.5 * 2 * math.log(0.5), 1.0),  # no lower bound
    ],
)
def test_cispo(weight: float, advantage: float, loss: float, gradient: float) -> None:
    assert token_loss(weight, advantage, loss_type="cispo", epsilon_high=5.0) == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    "weight, advantage, loss, gradient",
    [
        (1.0, 2.0, -4.0, -2.0),  # sigmoid(0) * 4 / 1 * 2; its slope is tau * 1/4 * 4 / tau = 1, that of plain GRPO
        (1.0, -2.0, 0.5 * 4 / 1.05 * 2, 2.0),  # tau is 1.05
        # sigmoid(log 3) = 0.75, with slope 0.75 * 0.25 * 4, times the weight
        (1 + math.log(3), 1.0, -3.0, -0.75 * (1 + math.log(3))),
    ],
)
def test_sapo(weight: float, advantage: float, loss: float, gradient: float) -> None:
    assert token_loss(weight, advantage, loss_type="sapo") == pytest.approx((loss, gradient))


def test_sapo_takes_each_signs_own_temperature() -> None:
    settings = {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 4.0}
    assert token_loss(1.0, 1.0, **settings)[0] == pytest.approx(-0.5 * 4 / 2)
    assert token_loss(1.0, -1.0, **settings)[0] == pytest.approx(0.5 * 4 / 4)


def test_vespo_weighs_whole_completions() -> None:
    # Log-ratios log 2 and 0 (a third token does not count): W = 2, whatever the length.
    # Positive: 2^2 exp(3 (1 - 2)); negative: 2^3 exp(2 (1 - 2)).
    logprobs = doubles([math.log(2), 0, 9], [math.log(2), 0, 9]).requires_grad_()
    mask = torch.tensor([[True, True, False]] * 2)
    losses = reference.policy_losses(
        logprobs, torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask, GRPOSettings(loss_type="vespo")
    )
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    good, bad = 4 * math.exp(-3), 8 * math.exp(-2)
    assert gradient[:, 0].tolist() == pytest.approx([-good, bad])
    assert gradient[:, 1].tolist() == pytest.approx([-good, bad])
    assert losses[:, 0].tolist() == pytest.approx([-good * math.log(2), bad * math.log(2)])


def test_sequence_weights_are_geometric_means() -> None:
    # Log-ratios log 2 and log 8, mean log 4; the third token does not count.
    logprobs = doubles([math.log(2), math.log(8), 5.0]).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    weights = reference.importance_weights(logprobs, torch.zeros(1, 3), mask, "sequence")
    assert weights.tolist() == [pytest.approx([4, 4, 4])]
    loss = (weights * mask).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [pytest.approx([4, 4, 0])]  # 2 tokens * weight 4 * 1/2
    tokens = reference.importance_weights(logprobs, torch.zeros(1, 3), mask, "token")
    assert tokens[0, :2].tolist() == pytest.approx([2, 8])
    with pytest.raises(ValueError, match="importance_sampling_level='word' is not documented"):
        reference.importance_weights(logprobs, logprobs, mask, "word")


def test_luspo_is_clipped_by_the_completion() -> None:
    settings = GRPOSettings(loss_type="luspo", importance_sampling_level="sequence")
    logprobs = doubles([math.log(2), math.log(0.5)]).requires_grad_()  # tokens 2 and 1/2, the completion 1
    mask = torch.ones(1, 2, dtype=torch.bool)
    losses = reference.policy_losses(logprobs, torch.zeros(1, 2), torch.tensor([1.0]), mask, settings)
    assert losses.tolist() == [pytest.approx([-1, -1])]
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert gradient.tolist() == [pytest.approx([-1, -1])]


# Two micro-batches of two completions: 1 and 3 tokens, 2 and 4 tokens. Every token of a completion has the same loss:
# 1, 2, 3, 4.
LENGTHS, LOSSES = ([1, 3], [2, 4]), ([1.0, 2.0], [3.0, 4.0])
EXPECTED = {
    "grpo": (1 + 2 + 3 + 4) / 4,
    "sapo": (1 + 2 + 3 + 4) / 4,
    "bnpo": ((1 * 1 + 3 * 2) / 4 + (2 * 3 + 4 * 4) / 6) / 2,
    "dr_grpo": (1 * 1 + 3 * 2 + 2 * 3 + 4 * 4) / (4 * 8),  # max_completion_length is 8
    "dapo": (1 * 1 + 3 * 2 + 2 * 3 + 4 * 4) / 10,
    "cispo": (1 * 1 + 3 * 2 + 2 * 3 + 4 * 4) / 10,
    "luspo": (1 * 1 + 3 * 2 + 2 * 3 + 4 * 4) / 4,
    "vespo": (1 * 1 + 3 * 2 + 2 * 3 + 4 * 4) / 4,
}


def masks_of(lengths: tuple[list[int], ...]) -> list[Tensor]:
    return [torch.arange(4)[None] < torch.tensor(each)[:, None] for each in lengths]


def normalised(loss_type: str, masks: list[Tensor], **undecided: Any) -> float:
    level = "sequence" if loss_type == "luspo" else "token"
    settings = GRPOSettings(
        loss_type=loss_type,
        importance_sampling_level=level,
        max_completion_length=8,
        undecided=Undecided(**undecided),
    )
    tokens = int(sum(mask.sum() for mask in masks))
    shares = [
        reference.token_shares(mask, settings, step_tokens=tokens, micro_batches=len(masks)).double() for mask in masks
    ]
    return float(sum((share * doubles(loss).T).sum() for share, loss in zip(shares, LOSSES, strict=True)))


@pytest.mark.parametrize("loss_type", EXPECTED)
def test_the_normalisation_of_each_loss(loss_type: str) -> None:
    assert normalised(loss_type, masks_of(LENGTHS)) == pytest.approx(EXPECTED[loss_type])


@pytest.mark.parametrize(
    "loss_type, counted, left_out",
    [
        # The completion with loss 4 is excluded: 3 of 4, or 3 of 1 + 2 with the second micro-batch on its own.
        ("grpo", (1 + 2 + 3) / 4, ((1 + 2) / 2 + 3 / 1) / 2),
        ("dr_grpo", (1 + 6 + 6) / 4 / 8, ((1 + 6) / 2 + 6 / 1) / 2 / 8),
        ("dapo", (1 + 6 + 6) / 6, (1 + 6 + 6) / 6),
        ("bnpo", ((1 + 6) / 4 + 6 / 2) / 2, ((1 + 6) / 4 + 6 / 2) / 2),
    ],
)
def test_excluded_completions_count_or_not(loss_type: str, counted: float, left_out: float) -> None:
    masks = masks_of(([1, 3], [2, 0]))
    assert normalised(loss_type, masks) == pytest.approx(counted)
    assert normalised(loss_type, masks, masked_completions_count=False) == pytest.approx(left_out)


def test_vespo_may_be_a_mean_over_tokens() -> None:
    assert normalised("vespo", masks_of(LENGTHS), vespo_mean="tokens") == pytest.approx(EXPECTED["dapo"])


def test_normalisations_coincide_for_equal_lengths() -> None:
    masks = masks_of(([4, 4], [4, 4]))
    found = {kind: normalised(kind, masks) for kind in ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")}
    assert found == pytest.approx({"grpo": 2.5, "bnpo": 2.5, "dapo": 2.5, "dr_grpo": 2.5 / 2, "luspo": 2.5 * 4})


def test_nothing_that_counts_gives_no_loss() -> None:
    masks = masks_of(([0, 0], [0, 0]))
    assert {kind: normalised(kind, masks) for kind in EXPECTED} == dict.fromkeys(EXPECTED, 0.0)


def test_bad_completions_that_the_policy_has_left_are_masked() -> None:
    # Means of log pi_old - log pi over the tokens that count: 1, 1, 0.4, -1.
    old = doubles([1.5, 0.5, 9], [1.5, 0.5, 9], [0.4, 0.4, 9], [-1, -1, 9])
    mask = torch.tensor([[True, True, False]] * 4)
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    found = reference.on_policy_mask(torch.zeros(4, 3), old, advantages, mask, 0.5)
    assert found.tolist() == [False, True, True, True]
    assert reference.on_policy_mask(torch.zeros(4, 3), old, advantages, mask, None).tolist() == [True] * 4


@pytest.mark.parametrize(
    "quantile, kept",
    [
        (1.0, [[True, True, True], [True, True, False]]),
        (0.5, [[False, False, True], [True, True, False]]),  # the median of 1 2 3 4 5 is 3, which stays
        (0.2, [[False, False, False], [False, True, False]]),  # 1 - 0.2 of 4 steps: 4.2
        (0.0, [[False, False, False], [False, True, False]]),
    ],
)
def test_tokens_of_high_entropy_stay(quantile: float, kept: list[list[bool]]) -> None:
    entropies = doubles([1, 2, 3], [4, 5, 99])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert reference.high_entropy_mask(entropies, mask, quantile).tolist() == kept


def test_kl_is_that_of_the_third_estimator() -> None:
    logprobs = doubles([math.log(0.25), math.log(0.5)]).requires_grad_()
    other = doubles([math.log(0.5), math.log(0.5)])
    found = reference.kl_estimate(logprobs, other)  # r = 2: 2 - log 2 - 1; r = 1: 0
    assert found.tolist() == [pytest.approx([1 - math.log(2), 0.0])]
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert gradient.tolist() == [pytest.approx([1 - 2, 0])]  # -r + 1


def test_the_weights_of_an_unbiased_kl_have_a_gradient() -> None:
    logprobs = doubles([math.log(0.25)]).requires_grad_()
    weights = reference.importance_weights(logprobs, doubles([math.log(0.125)]), torch.ones(1, 1).bool())
    found = reference.kl_estimate(logprobs, doubles([math.log(0.5)]), weights)
    assert found.tolist() == [pytest.approx([2 * (1 - math.log(2))])]
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert gradient.tolist() == [pytest.approx([2 * (1 - math.log(2)) + 2 * (1 - 2)])]


def test_what_is_clipped() -> None:
    weights = doubles([0.7, 1.0, 1.4], [0.7, 1.0, 1.4])
    advantages = torch.tensor([1.0, -1.0])
    low, high = reference.clipped(weights, advantages, 0.2, 0.3)
    assert low.tolist() == [[False] * 3, [True, False, False]]
    assert high.tolist() == [[False, False, True], [False] * 3]
    low, high = reference.clipped(weights, advantages, 0.2, 0.5, by_sign=False)
    assert low.tolist() == [[True, False, False]] * 2
    assert not high.any()


def test_the_entropy_coefficient_follows_the_entropy() -> None:
    settings = GRPOSettings(entropy_target=2.0, entropy_coef_delta=0.1, entropy_coef_min=0.05, entropy_coef_max=0.3)
    assert reference.entropy_control(1.9, 0.1, settings) == pytest.approx((0.1, 0.2))
    assert reference.entropy_control(2.0, 0.1, settings) == pytest.approx((0.1, 0.2))
    assert reference.entropy_control(2.1, 0.2, settings) == pytest.approx((0.0, 0.1))
    assert reference.entropy_control(1.9, 0.25, settings) == pytest.approx((0.25, 0.3))
    assert reference.entropy_control(2.1, 0.1, settings) == pytest.approx((0.0, 0.05))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"loss_type": "ppo"}, "loss_type='ppo'; choose one of 'grpo', 'bnpo', "),
        ({"loss_type": "luspo"}, "loss_type='luspo' requires importance_sampling_level='sequence'"),
        ({"num_generations": 1}, "num_generations=1, but a group has at least 2 completions"),
        ({"top_entropy_quantile": 1.5}, "top_entropy_quantile=1.5 is not between 0 and 1"),
        ({"temperature": 0.0}, "temperature=0.0 is not positive"),
        ({"steps_per_generation": 0}, "micro_batches_per_generation=0 is not positive"),
    ],
)
def test_settings_that_are_not_documented_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOSettings(**settings)
    with pytest.raises(ValueError, match="metrics_mean='rows'; choose one of 'tokens', 'micro_batches', 'ranks'"):
        Undecided(metrics_mean="rows")
