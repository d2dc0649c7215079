"""The reference's losses of desirable and undesirable completions, by numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference
from pytest_trlcompat.reference import KTOSettings, KTOUndecided

from .reference_models import Bigrams

LOG3 = math.log(3.0)
HALF = math.log(2.0)


def losses_of(log_ratios: Sequence[float], desirable: Sequence[bool], kl: float, **settings: Any) -> list[float]:
    asked = KTOSettings(**{"beta": 0.5, **settings})
    ratios = torch.tensor(log_ratios, dtype=torch.float64)
    found: list[float] = reference.unpaired_losses(ratios, torch.tensor(desirable), torch.tensor(kl), asked).tolist()
    return found


def test_what_is_desirable_is_to_be_above_the_reference_point() -> None:
    # beta (r - kl) = log 3, whose sigmoid is 3/4, and -log 3, whose sigmoid is 1/4.
    assert losses_of([2 * LOG3 + 1, 1 - 2 * LOG3], [True, True], 1.0) == pytest.approx([0.25, 0.75])
    assert losses_of([2 * LOG3 + 1, 1 - 2 * LOG3], [False, False], 1.0) == pytest.approx([0.75, 0.25])


def test_without_a_reference_point() -> None:
    found = losses_of([2 * LOG3, 2 * LOG3], [True, False], 5.0, loss_type="apo_zero_unpaired")
    assert found == pytest.approx([0.25, 0.75])


def test_weights() -> None:
    found = losses_of([0.0, 0.0], [True, False], 0.0, desirable_weight=0.5, undesirable_weight=3.0)
    assert found == pytest.approx([0.25, 1.5])


def test_mismatched_completions() -> None:
    assert reference.mismatched([1, 2, 3], KTOSettings()) == [3, 1, 2]
    as_before = KTOSettings(undecided=KTOUndecided(mismatch="reversed"))
    assert reference.mismatched([1, 2, 3], as_before) == [3, 2, 1]


def test_other_losses_are_refused() -> None:
    with pytest.raises(ValueError, match="bco"):
        KTOSettings(loss_type="bco")


class Model(torch.nn.Module):
    """As Transformers' models return what they compute."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.bigrams = Bigrams(table)

    def forward(self, **inputs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.bigrams(**inputs))


def favouring(token: int, times: float) -> Model:
    """After any token, one of four is so many times as likely as each of the others."""
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[:, token] = math.log(times)
    return Model(table)


def row(completion: list[int], label: bool, other: list[int]) -> dict[str, tuple[float, ...]]:
    """Completions of the prompt 0."""
    columns = {"ids": (0, *completion), "mask": (0, *(1 for _ in completion))}
    kl = {"kl_ids": (0, *other), "kl_mask": (0, *(1 for _ in other))}
    numbers = {name: tuple(map(float, values)) for name, values in {**columns, **kl}.items()}
    return {**numbers, "label": (float(label),)}


POLICY, BEFORE = favouring(1, 3.0), favouring(1, 1.0)
"""After any token 1 has the probability 1/2, and each other one 1/6; before, all have 1/4."""
BATCHES = [[row([1, 1], True, [2]), row([2], False, [1, 1])], [row([1], True, [1]), row([1], True, [1])]]
"""Of two ranks; log-ratios of completions: 2 log 2, log 2/3, log 2, log 2; of mismatched ones log 2/3, 2 log 2, log 2
twice."""
KL = (math.log(2 / 3) + 4 * HALF) / 4


def measured(**settings: Any) -> list[reference.Measured]:
    asked = KTOSettings(**{"beta": 1.0, "world_size": 2, **settings})
    return reference.KTOObjective(BEFORE, asked)(POLICY, [BATCHES])


def test_the_reference_point_is_that_of_all_ranks() -> None:
    found = measured()
    assert [one.metrics["kl"] for one in found] == [(pytest.approx(KL), 1.0)] * 2
    losses = losses_of([2 * HALF, math.log(2 / 3), HALF, HALF], [True, False, True, True], KL, beta=1.0)
    alone = [float(one.alone) for one in found if one.alone is not None]
    assert alone == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])
    assert [float(one.loss) for one in found] == pytest.approx([each / 2 for each in alone])


def test_it_is_at_least_zero() -> None:
    asked = KTOSettings(beta=1.0, world_size=1)
    unlikely = [[[row([1], True, [2]), row([2], False, [2])]]]
    (found,) = reference.KTOObjective(BEFORE, asked)(POLICY, unlikely)
    assert found.metrics["kl"] == (0.0, 1.0)


def test_it_has_no_gradient() -> None:
    policy = favouring(1, 3.0)
    asked = KTOSettings(beta=1.0, world_size=1)
    (found,) = reference.KTOObjective(BEFORE, asked)(policy, [[[row([2], True, [1]), row([2], True, [1])]]])
    found.loss.backward()
    # 1 - s(r - kl) of r = log 2/3 and kl = log 2: s = 1/4. Its derivative by r is -s (1 - s), and that of r by the
    # logit of the favoured token minus its probability.
    assert policy.bigrams.table.grad is not None
    assert float(policy.bigrams.table.grad[0, 1]) == pytest.approx(0.25 * 0.75 * 0.5)


def test_values_and_metrics() -> None:
    first, second = measured()
    assert {name: values.tolist() for name, values in first.values.items()} == {
        "logps[chosen]": [pytest.approx(-2 * HALF)],
        "logps[rejected]": [pytest.approx(-math.log(6))],
        "logps[kl]": [pytest.approx(-math.log(6)), pytest.approx(-2 * HALF)],
        "logps[reference_chosen]": [pytest.approx(-4 * HALF)],
        "logps[reference_rejected]": [pytest.approx(-2 * HALF)],
        "logps[reference_kl]": [pytest.approx(-2 * HALF), pytest.approx(-4 * HALF)],
    }
    assert first.metrics["rewards/chosen"] == (pytest.approx(2 * HALF), 1.0)
    assert second.metrics["rewards/chosen"] == (pytest.approx(2 * HALF), 2.0)
    assert second.metrics["rewards/rejected"] == (0.0, 0.0)
    assert first.metrics["logps/chosen"] == (pytest.approx(-2 * HALF), 1.0)
    assert first.metrics["logits/chosen"] == (pytest.approx(2 * LOG3 / 4), 2.0)
    entropy = 0.5 * HALF + 0.5 * math.log(6)
    assert first.metrics["entropy"] == (pytest.approx(3 * entropy), 3.0)
    assert (first.counted, second.counted) == ({"num_tokens": 5.0}, {"num_tokens": 4.0})
    assert "logits/chosen" not in measured(undecided=KTOUndecided(counted_logits="left_out"))[0].metrics


def test_a_margin_is_the_difference_of_means_or_that_of_micro_batches() -> None:
    settings = KTOSettings(beta=1.0, world_size=2, optim="sgd", learning_rate=0.0)
    of_micro_batches = KTOUndecided(margins="micro_batches", metrics_mean="micro_batches")
    other = KTOSettings(**{**vars(settings), "undecided": of_micro_batches})
    steps = [[BATCHES, [[row([2], True, [1])], [row([2], True, [1])]]]]  # the second micro-batch has no margin
    found = []
    for asked in (settings, other):
        trained = reference.supervised_train(POLICY, steps, asked, reference.KTOObjective(BEFORE, asked))
        found.append(reference.supervised_logs(trained, asked)["rewards/margins"])
    rejected = math.log(2 / 3)
    # Desirable: 2 log 2, log 2, log 2 in the first micro-batch, log 2/3 twice in the second.
    assert found[0] == pytest.approx((4 * HALF + 2 * rejected) / 5 - rejected)
    assert found[1] == pytest.approx(4 * HALF / 3 - rejected)
