"""SFT's reference, with numbers computed by hand: the next token depends on the last one alone, see ``Bigrams``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference
from pytest_trlcompat.reference import IGNORED, SFTSettings, SFTUndecided

from .reference_models import Bigrams, random_bigrams, uniform

Row = Mapping[str, Sequence[int]]


def row(ids: Sequence[int], counted: str) -> Row:
    """``counted``: a mark for each token, ``x`` where it counts."""
    return {
        "input_ids": ids,
        "labels": [each if mark == "x" else IGNORED for each, mark in zip(ids, counted, strict=True)],
    }


def half() -> Bigrams:
    """After token 0 comes 1 with probability 1/2, and 0, 2 and 3 with 1/6 each; after any other all are alike."""
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[0, 1] = math.log(3.0)
    return Bigrams(table)


def measured(model: Bigrams, batches: Any, **settings: Any) -> list[reference.Measured]:
    return reference.sft_objective(SFTSettings(**settings))(model, batches)


def test_the_loss_is_the_mean_over_the_tokens_that_count() -> None:
    (one,) = measured(half(), [[[row([0, 1, 2], ".xx"), row([3, 0, 1, 0], "..xx")]]])
    # 0 -> 1: log 2; 1 -> 2: log 4; 0 -> 1: log 2; 1 -> 0: log 4
    assert float(one.loss.detach()) == pytest.approx((2 * math.log(2) + 2 * math.log(4)) / 4)
    assert one.counted == {"num_tokens": 7.0}


def test_the_first_token_is_predicted_by_nothing() -> None:
    first, none = (measured(half(), [[[row([0, 1], marks)]]])[0] for marks in ("xx", ".x"))
    assert float(first.loss.detach()) == float(none.loss.detach()) == pytest.approx(math.log(2))
    chosen = SFTUndecided(first_token_counts=True)
    (counted,) = measured(half(), [[[row([0, 1], "xx")]]], undecided=chosen)
    assert float(counted.loss.detach()) == pytest.approx(math.log(2) / 2)


STEP = [[[row([0, 1, 2, 3], ".xxx")], [row([0, 1], ".x")]], [[row([0, 0], ".x")], [row([1, 0, 1], "..x")]]]
"""Two micro-batches of two ranks: sums of log 2 + 2 log 4, log 2, log 6 and log 2 over 3, 1, 1 and 1 tokens."""
SUMS, COUNTS = [math.log(2) + 2 * math.log(4), math.log(2), math.log(6), math.log(2)], [3, 1, 1, 1]


@pytest.mark.parametrize(
    "settings, shares",
    [
        ({}, [1 / 6] * 4),
        ({"average_tokens_across_devices": False}, [1 / 8, 1 / 4, 1 / 8, 1 / 4]),
        ({"undecided": SFTUndecided(loss_mean="micro_batches")}, [1 / 12, 1 / 4, 1 / 4, 1 / 4]),
    ],
)
def test_what_each_micro_batch_of_each_rank_adds_to_the_loss(settings: Any, shares: list[float]) -> None:
    found = [float(one.loss.detach()) for one in measured(half(), STEP, world_size=2, **settings)]
    assert found == pytest.approx([total * share for total, share in zip(SUMS, shares, strict=True)])
    alone = [
        float(one.alone.detach()) for one in measured(half(), STEP, world_size=2, **settings) if one.alone is not None
    ]
    assert alone == pytest.approx([total / count for total, count in zip(SUMS, COUNTS, strict=True)])


def test_dynamic_fine_tuning_weighs_each_token_with_its_probability_which_has_no_gradient() -> None:
    model = half()
    (one,) = measured(model, [[[row([0, 1, 2], ".xx")]]], loss_type="dft")
    assert float(one.loss.detach()) == pytest.approx((math.log(2) / 2 + math.log(4) / 4) / 2)
    one.loss.backward()
    assert model.table.grad is not None
    # Of -log p the gradient is p - 1 at the token and p elsewhere; times p of the token, over 2 tokens.
    assert model.table.grad[0].tolist() == pytest.approx([1 / 24, -1 / 8, 1 / 24, 1 / 24])
    assert model.table.grad[1].tolist() == pytest.approx([1 / 32, 1 / 32, -3 / 32, 1 / 32])


def test_a_batch_in_which_nothing_counts_has_a_loss_of_zero() -> None:
    (one,) = measured(half(), [[[row([0, 1], "..")]]])
    assert (float(one.loss.detach()), float(one.metrics["entropy"][1])) == (0.0, 0.0)


def test_what_is_logged_of_tokens() -> None:
    (one,) = measured(half(), [[[row([0, 1, 2], ".x."), row([1, 0, 1], "..x")]]])
    entropy = math.log(2) / 2 + math.log(6) / 2
    assert [float(each) for each in one.metrics["entropy"]] == pytest.approx([2 * entropy, 2.0])
    assert [float(each) for each in one.metrics["mean_token_accuracy"]] == [2.0, 2.0]
    chosen = SFTUndecided(entropy_over="tokens")
    (every,) = measured(half(), [[[row([0, 1, 2], ".x.")]]], undecided=chosen)
    assert [float(each) for each in every.metrics["entropy"]] == pytest.approx([entropy + 2 * math.log(4), 3.0])


def test_rows_do_not_see_each_other() -> None:
    model = random_bigrams()
    rows = [row([2, 3, 4], ".xx"), row([5, 6], ".x")]
    both = measured(model, [[rows]])[0]
    each = [measured(model, [[[one]]])[0] for one in rows]
    assert float(both.loss.detach()) * 3 == pytest.approx(
        float(each[0].loss.detach()) * 2 + float(each[1].loss.detach())
    )


class Routed(Bigrams):
    """With a router that gives the tokens of a row to one of two experts."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, output_router_logits: bool = False) -> Any:
        assert output_router_logits
        logits = torch.stack([input_ids[0] * 0.0, input_ids[0] * 0.0 + math.log(3.0)], -1)
        return type("Output", (), {"logits": super().forward(input_ids, attention_mask), "router_logits": (logits,)})


def test_the_auxiliary_loss_of_experts_is_a_mean_over_micro_batches_and_ranks() -> None:
    model = Routed(half().table.detach())
    plain = [float(one.loss.detach()) for one in measured(half(), STEP, world_size=2)]
    found = measured(model, STEP, world_size=2, router_aux_loss_coef=0.5, experts_per_token=1)
    # All tokens go to the second of two experts, which has the probability 3/4: 2 * 3/4.
    assert [float(one.loss.detach()) for one in found] == pytest.approx([each + 0.5 * 1.5 / 4 for each in plain])
    assert [float(one.metrics["aux_loss"][0]) for one in found] == pytest.approx([1.5] * 4)


def test_a_uniform_model_trains_as_by_hand() -> None:
    settings = SFTSettings(optim="sgd", learning_rate=2.0, max_grad_norm=None, lr_scheduler_type="constant")
    (step,) = reference.supervised_train(
        uniform(), [[[[row([0, 1, 2], ".xx")]]]], settings, reference.sft_objective(settings)
    )
    assert step.loss == pytest.approx(math.log(4))
    assert step.weights["table"][0].tolist() == pytest.approx([-0.25, 0.75, -0.25, -0.25])
    logs = reference.supervised_logs((step,), settings)
    assert logs["num_tokens"] == 3.0
    assert logs["entropy"] == pytest.approx(math.log(4))


def test_labels() -> None:
    assert reference.labels_of([5, 6, 7], [True, False, True]) == (IGNORED, IGNORED, 7)


@pytest.mark.parametrize(
    "limit, mode, kept",
    [
        (None, "keep_start", (1, 2, 3, 4)),
        (4, "keep_end", (1, 2, 3, 4)),
        (3, "keep_start", (1, 2, 3)),
        (3, "keep_end", (2, 3, 4)),
    ],
)
def test_truncation(limit: int | None, mode: str, kept: tuple[int, ...]) -> None:
    assert reference.truncated([1, 2, 3, 4], limit, mode) == kept


def test_best_fit_decreasing() -> None:
    # 7 | 6 + 4 | 5 + 3 + 2 | 1 fits with 7, which has least room: 10 - 7 = 3
    assert reference.best_fit_bins([2, 4, 7, 1, 6, 5, 3], 10) == [[2, 6], [4, 1], [5, 0, 3]]
    with pytest.raises(ValueError, match="a row of 11 tokens fits into no bin of 10"):
        reference.best_fit_bins([11], 10)


def test_splitting_and_wrapping() -> None:
    assert reference.split_rows([1, 2, 3, 4, 5], 2) == [(1, 2), (3, 4), (5,)]
    rows = [{"input_ids": [1, 2, 3], "labels": [7, 2, 3]}, {"input_ids": [4, 5], "labels": [7, 5]}]
    kept = [{"input_ids": (1, 2), "labels": (7, 2)}, {"input_ids": (3, 4), "labels": (3, 7)}]
    assert reference.wrapped_blocks(rows, 2, "dropped") == kept
    assert reference.wrapped_blocks(rows, 2) == [*kept, {"input_ids": (5,), "labels": (5,)}]


def test_a_loss_that_is_not_documented_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_type='l1'; choose one of 'nll', 'dft', 'chunked_nll'"):
        SFTSettings(loss_type="l1")
