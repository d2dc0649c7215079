"""The reference's losses of pairs of completions, and what it logs of them, by numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_trlcompat import reference
from pytest_trlcompat.reference import PairScores, PreferenceSettings, PreferenceUndecided

LOG3 = math.log(3.0)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def scores(chosen: list[float], rejected: list[float], lengths: tuple[float, float] = (2.0, 4.0)) -> PairScores:
    """Log-probabilities of the policy; those of the reference model are -1 and -2."""
    size = len(chosen)
    return PairScores(
        *(doubles(*chosen), doubles(*rejected), doubles(*[-1.0] * size), doubles(*[-2.0] * size)),
        *(doubles(*[each] * size) for each in lengths),
    )


def loss_of(loss_type: str, chosen: float, rejected: float, shift: float = 0.0, **settings: Any) -> float:
    """Of a pair whose log-ratios are ``chosen`` and ``rejected``."""
    pair = scores([chosen - 1.0], [rejected - 2.0])
    asked = PreferenceSettings(**{"loss_type": (loss_type,), "beta": 0.5, **settings})
    (found,) = reference.pair_losses(pair, loss_type, asked, doubles(shift)[0]).tolist()
    return float(found)


@pytest.mark.parametrize(
    "loss_type, chosen, rejected, expected",
    [
        ("sigmoid", LOG3, -LOG3, math.log(4 / 3)),  # beta z = log 3, whose sigmoid is 3/4
        ("hinge", 1.0, 0.5, 0.75),  # 1 - 0.5 * 0.5
        ("hinge", 3.0, 0.5, 0.0),
        ("ipo", 3.0, 0.5, 2.25),  # (2.5 - 1)^2
        ("sppo_hard", 3.0, 0.5, 4.0 + 2.25),  # (3 - 1)^2 + (0.5 + 1)^2
        ("nca_pair", 2 * LOG3, -2 * LOG3, math.log(4 / 3) + math.log(4) / 2 + math.log(4 / 3) / 2),
        ("apo_zero", 2 * LOG3, -2 * LOG3, 0.25 + 0.25),
        ("apo_down", 2 * LOG3, 0.0, 0.75 + 0.25),
        ("sigmoid_norm", 4 * LOG3, 0.0, math.log(4 / 3)),  # 4 log 3 / 2 tokens, times beta
        ("sigmoid_norm", 0.0, -8 * LOG3, math.log(4 / 3)),  # 8 log 3 / 4 tokens
    ],
)
def test_losses_of_one_pair(loss_type: str, chosen: float, rejected: float, expected: float) -> None:
    assert loss_of(loss_type, chosen, rejected) == pytest.approx(expected)


def test_label_smoothing() -> None:
    good, bad = math.log(4 / 3), math.log(4)
    assert loss_of("robust", LOG3, -LOG3, label_smoothing=0.1) == pytest.approx((0.9 * good - 0.1 * bad) / 0.8)
    exo = 0.75 * math.log(0.75 / 0.9) + 0.25 * math.log(0.25 / 0.1)
    assert loss_of("exo_pair", LOG3, -LOG3, label_smoothing=0.1) == pytest.approx(exo)
    assert loss_of("sigmoid", LOG3, -LOG3, label_smoothing=0.1) == pytest.approx(good)
    smoothed = loss_of("sigmoid", LOG3, -LOG3, label_smoothing=0.1, smoothed=True)
    assert smoothed == pytest.approx(0.9 * good + 0.1 * bad)
    least = 0.75 * math.log(0.75 / 0.999) + 0.25 * math.log(0.25 / 0.001)
    assert loss_of("exo_pair", LOG3, -LOG3, smoothed=True) == pytest.approx(least)


def test_the_binary_classifier_subtracts_the_shift() -> None:
    found = loss_of("bco_pair", 2 * LOG3 + 2.0, 2.0 - 2 * LOG3, shift=1.0)
    assert found == pytest.approx(2 * math.log(4 / 3))


def test_the_discovered_loss_mixes_two() -> None:
    mixture = 81 / 82  # sigmoid(4 log 3), from beta z = log 3 and tau = 1/4
    expected = (1 - mixture) * math.log(4 / 3) + mixture / 3
    assert loss_of("discopop", LOG3, -LOG3, discopop_tau=0.25) == pytest.approx(expected)


@pytest.mark.parametrize(
    "divergence, margin",
    [
        ("reverse_kl", math.log(2) - math.log(0.5)),
        ("forward_kl", -1 / 2 + 1 / 0.5),
        ("js_divergence", math.log(4 / 3) - math.log(1 / 1.5)),
        ("alpha_divergence", (0.5**-0.5 - 2**-0.5) / 0.5),
    ],
)
def test_divergences(divergence: str, margin: float) -> None:
    found = loss_of("hinge", math.log(2), math.log(0.5), f_divergence_type=divergence, beta=0.1)
    assert found == pytest.approx(1 - 0.1 * margin)


def test_averaged_log_likelihoods_of_ipo() -> None:
    undecided = PreferenceUndecided(ipo_averaged=True)
    assert loss_of("ipo", 3.0, 2.0, undecided=undecided) == pytest.approx((1.5 - 0.5 - 1.0) ** 2)


def test_optimal_transport_sorts() -> None:
    # Of chosen to rejected: policy 3 and 1, reference model 1 and 1; sorted differences 0 and 2.
    pairs = scores([1.0, 0.0], [-2.0, -1.0])
    settings = PreferenceSettings(loss_type=("aot",), beta=0.5)
    found = reference.pair_losses(pairs, "aot", settings, doubles(0.0)[0])
    assert found.tolist() == pytest.approx([math.log(2), math.log(1 + math.exp(-1))])
    # Log-ratios: chosen 2 and 1, rejected 0 and 1; sorted 1 - 0 and 2 - 1.
    found = reference.pair_losses(pairs, "aot_unpaired", settings, doubles(0.0)[0])
    assert found.tolist() == pytest.approx([math.log(1 + math.exp(-0.5))] * 2)
    undecided = PreferenceUndecided(smoothed_aot=True)
    smoothed = PreferenceSettings(loss_type=("aot_pair",), beta=0.5, label_smoothing=0.25, undecided=undecided)
    found = reference.pair_losses(pairs, "aot_pair", smoothed, doubles(0.0)[0])
    expected = 0.75 * math.log(1 + math.exp(-0.5)) + 0.25 * math.log(1 + math.exp(0.5))
    assert found.tolist() == pytest.approx([expected] * 2)


def test_weights_of_pairs_have_no_gradient() -> None:
    chosen = doubles(math.log(2)).requires_grad_()
    weights = reference.pair_weights(chosen, doubles(math.log(0.75)), PreferenceSettings())
    assert weights.tolist() == pytest.approx([1.5])
    assert not weights.requires_grad
    at_most_one = PreferenceSettings(undecided=PreferenceUndecided(weight_at_most_one=True))
    assert reference.pair_weights(chosen, doubles(math.log(0.75)), at_most_one).tolist() == [1.0]


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"loss_type": ("dpo",)}, "loss_type='dpo' is not documented"),
        ({"loss_type": ("sigmoid", "sft"), "loss_weights": (1.0,)}, "2 loss types have 1 weights"),
        ({"loss_type": ("robust",), "label_smoothing": 0.5}, r"is not in \[0, 0.5\)"),
        ({"loss_type": ("exo_pair",)}, "label_smoothing must be greater than 0"),
        ({"ld_alpha": 1.5}, r"ld_alpha=1.5 is not in \[0, 1\]"),
        ({"f_divergence_type": "kl"}, "f_divergence_type='kl'; choose one of"),
        ({"undecided": PreferenceUndecided(nll_mean="tokens"), "optim": "adam"}, "optim='adam'; choose one of"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PreferenceSettings(**settings)


class Bigrams(torch.nn.Module):
    """The logits of the next token are a row of a table: probabilities 1/2, 1/4, 1/4 after token 0, and so on."""

    def __init__(self, *rows: list[float]) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(rows, dtype=torch.float64).log())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(logits=self.table[input_ids])


POLICY = Bigrams([0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.125, 0.125, 0.75])
UNIFORM = Bigrams([1 / 3] * 3, [1 / 3] * 3, [1 / 3] * 3)
ROW = reference.preference_row([0, 1], [1, 2], [0])
"""Chosen: 1/2 after 1, 1/4 after 1; rejected: 1/4 after 1."""


def measured(settings: PreferenceSettings, *rows: Any) -> reference.Measured:
    (found,) = reference.PreferenceObjective(UNIFORM, settings)(POLICY, [[list(rows) or [ROW]]])
    return found


def test_log_probabilities_of_completions() -> None:
    found = measured(PreferenceSettings(beta=0.5))
    assert found.values["logps[chosen]"].tolist() == pytest.approx([math.log(1 / 8)])
    assert found.values["logps[rejected]"].tolist() == pytest.approx([math.log(1 / 4)])
    assert found.values["logps[reference_chosen]"].tolist() == pytest.approx([math.log(1 / 9)])
    margin = math.log(9 / 8) - math.log(3 / 4)
    assert float(found.loss) == pytest.approx(math.log(1 + math.exp(-0.5 * margin)))
    metrics = {name: float(total) / count for name, (total, count) in found.metrics.items()}
    assert metrics["rewards/chosen"] == pytest.approx(0.5 * math.log(9 / 8))
    assert metrics["rewards/rejected"] == pytest.approx(0.5 * math.log(3 / 4))
    assert metrics["rewards/margins"] == pytest.approx(0.5 * margin)
    assert metrics["rewards/accuracies"] == 1.0
    assert metrics["logps/chosen"] == pytest.approx(math.log(1 / 8))
    entropy = 1.5 * math.log(2)  # the same of each row of the table
    assert metrics["entropy"] == pytest.approx(entropy)
    assert metrics["mean_token_accuracy"] == pytest.approx(1 / 2)  # token 1 after 1, of two tokens
    assert metrics["logits/chosen"] == pytest.approx((math.log(0.5) + 2 * math.log(0.25)) / 3)
    assert found.counted == {"num_tokens": 7.0}


def test_what_is_open_about_logged_tokens() -> None:
    undecided = PreferenceUndecided(counted_logits="tokens", logits_mean="tokens")
    metrics = measured(PreferenceSettings(undecided=undecided)).metrics
    assert float(metrics["logits/chosen"][0]) / metrics["logits/chosen"][1] == pytest.approx(math.log(1 / 8) / 2)


def test_logits_without_documentation_are_left_out() -> None:
    metrics = measured(PreferenceSettings(undecided=PreferenceUndecided(counted_logits="left_out"))).metrics
    assert [name for name in metrics if name.startswith("logits/")] == []


def test_supervised_terms_and_weights() -> None:
    nll = -math.log(1 / 8) / 2
    settings = PreferenceSettings(loss_type=("hinge", "sft"), loss_weights=(0.5, 2.0), beta=0.5)
    hinge = 1 - 0.5 * (math.log(9 / 8) - math.log(3 / 4))
    assert float(measured(settings).loss) == pytest.approx(0.5 * hinge + 2 * nll)
    settings = PreferenceSettings(loss_type=("hinge",), rpo_alpha=3.0, beta=0.5)
    assert float(measured(settings).loss) == pytest.approx(hinge + 3 * nll)
    settings = PreferenceSettings(loss_type=("hinge",), use_weighting=True, beta=0.5)
    # Each distribution is (1/2, 1/4, 1/4): the sum of squares is 3/8. Chosen: the mean of log 4/3 and log 2/3.
    weight = math.exp((math.log(4 / 3) + math.log(2 / 3)) / 2 + math.log(2 / 3))
    assert float(measured(settings).loss) == pytest.approx(weight * hinge)


def test_negative_log_likelihood_over_tokens_or_completions() -> None:
    other = reference.preference_row([0, 1], [1], [0])
    settings = PreferenceSettings(loss_type=("sft",))
    by_completion = (-math.log(1 / 8) / 2 - math.log(1 / 2)) / 2
    assert float(measured(settings, ROW, other).loss) == pytest.approx(by_completion)
    settings = PreferenceSettings(loss_type=("sft",), undecided=PreferenceUndecided(nll_mean="tokens"))
    assert float(measured(settings, ROW, other).loss) == pytest.approx(-(math.log(1 / 8) + math.log(1 / 2)) / 3)


def test_tokens_beyond_the_shorter_completion_count_less() -> None:
    found = measured(PreferenceSettings(ld_alpha=0.5))
    assert found.values["logps[chosen]"].tolist() == pytest.approx([math.log(1 / 2) + 0.5 * math.log(1 / 4)])
    assert found.values["logps[reference_chosen]"].tolist() == pytest.approx([math.log(1 / 9)])
    undecided = PreferenceUndecided(length_desensitized_reference=True)
    found = measured(PreferenceSettings(ld_alpha=0.5, undecided=undecided))
    assert found.values["logps[reference_chosen]"].tolist() == pytest.approx([1.5 * math.log(1 / 3)])


def test_without_a_reference_model() -> None:
    found = measured(PreferenceSettings(loss_type=("hinge",), reference_free=True, beta=0.5))
    assert float(found.loss) == pytest.approx(1 - 0.5 * (math.log(1 / 8) - math.log(1 / 4)))


def test_the_shift_is_of_a_batch_or_of_all_until_now() -> None:
    other = reference.preference_row([0, 1], [1], [0])
    ratios = math.log(9 / 8), math.log(3 / 4), math.log(3 / 2), math.log(3 / 4)
    for way, shift in (("batch", (ratios[2] + ratios[3]) / 2), ("running", sum(ratios) / 4)):
        settings = PreferenceSettings(
            loss_type=("bco_pair",), beta=1.0, undecided=PreferenceUndecided(reward_shift=way)
        )
        _, second = reference.PreferenceObjective(UNIFORM, settings)(POLICY, [[[ROW]], [[other]]])
        expected = math.log(1 + math.exp(shift - ratios[2])) + math.log(1 + math.exp(ratios[3] - shift))
        assert float(second.loss) == pytest.approx(expected / 2), way


def test_the_reference_model_follows() -> None:
    follower = Bigrams([1 / 3] * 3, [1 / 3] * 3, [1 / 3] * 3)
    settings = PreferenceSettings(sync_ref_model=True, ref_model_mixup_alpha=0.25, ref_model_sync_steps=2)
    after_step = reference.synchronised(follower, settings)
    after_step(POLICY, 1)
    assert follower.table[0, 0].item() == pytest.approx(math.log(1 / 3))
    after_step(POLICY, 2)
    assert follower.table[0, 0].item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1 / 3))


def test_truncation() -> None:
    row = reference.preference_row([5, 6, 7], [8, 9], [8], max_length=4)
    assert row == {
        "chosen": (5, 6, 7, 8),
        "chosen_mask": (0, 0, 0, 1),
        "rejected": (5, 6, 7, 8),
        "rejected_mask": (0, 0, 0, 1),
    }
    row = reference.preference_row([5, 6, 7], [8, 9], [8], max_length=2, truncation_mode="keep_end")
    assert (row["chosen"], row["chosen_mask"]) == ((8, 9), (1, 1))
    assert (row["rejected"], row["rejected_mask"]) == ((7, 8), (0, 1))
    row = reference.preference_row([5, 6, 7], [8, 9], [8], max_prompt_length=1, max_completion_length=1)
    assert (row["chosen"], row["rejected"]) == ((7, 8), (7, 8))
    with pytest.raises(ValueError, match="truncation_mode='left'"):
        reference.preference_row([5], [6], [7], truncation_mode="left")


def test_implicit_prompts() -> None:
    assert reference.common_prompt("The sky is blue.", "The sky is green.") == ("The sky is", " blue.", " green.")
    asked, first, second = ({"role": "user", "content": each} for each in ("q", "a", "b"))
    assert reference.shared_messages([asked, first], [asked, second]) == ([asked], [first], [second])


def test_a_first_token_has_no_probability() -> None:
    row = reference.preference_row([0], [1, 2], [1, 0], max_length=2, truncation_mode="keep_end")
    found = measured(PreferenceSettings(), row)
    assert found.values["logps[chosen]"].tolist() == pytest.approx([math.log(1 / 4)])


def test_a_sequence_of_which_nothing_is_left_has_no_log_probability() -> None:
    row = {**reference.preference_row([0, 1], [1], [0]), "rejected": (), "rejected_mask": ()}
    found = measured(PreferenceSettings(), row)
    assert found.values["logps[chosen]"].tolist() == pytest.approx([math.log(1 / 2)])
    assert found.values["logps[rejected]"].tolist() == [0.0]
