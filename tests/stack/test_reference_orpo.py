"""The reference's odds ratios and losses of pairs, and ORPO's rows, by numbers worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference
from pytest_trlcompat.reference import ORPOSettings, ORPOUndecided

from .reference_models import Bigrams

LOG2, LOG3, LOG6 = math.log(2.0), math.log(3.0), math.log(6.0)


def ratios(chosen: float, rejected: float) -> float:
    found: torch.Tensor = reference.log_odds_ratios(*torch.tensor([[chosen], [rejected]], dtype=torch.float64))
    return found.item()


def test_an_odds_ratio_is_that_of_probabilities_and_their_complements() -> None:
    # 3/4 against 1/4 is 3, and 1/3 against 2/3 is 1/2.
    assert ratios(math.log(3 / 4), math.log(1 / 3)) == pytest.approx(LOG6)
    assert ratios(math.log(1 / 3), math.log(3 / 4)) == pytest.approx(-LOG6)
    assert ratios(-LOG2, -LOG2) == 0.0


def test_an_odds_ratio_of_probabilities_near_1_and_near_0_is_precise() -> None:
    # 1 - exp(-1e-9) is 1e-9 to its first nine digits, and exp(-40) / (1 - exp(-40)) is exp(-40).
    assert ratios(-1e-9, -LOG2) == pytest.approx(9 * math.log(10), rel=1e-9)
    assert ratios(-40.0, -LOG2) == pytest.approx(-40.0)


PROMPT, CHOSEN, REJECTED = [5, 6, 7, 8], [9, 1], [10, 11, 1]


def row_of(**limits: Any) -> tuple[list[float], list[float], list[float]]:
    """The chosen sequence, its mask, and the rejected sequence."""
    row = reference.orpo_row(PROMPT, CHOSEN, REJECTED, **limits)
    return [*row["chosen"]], [*row["chosen_mask"]], [*row["rejected"]]


@pytest.mark.parametrize(
    "limits, chosen, mask, rejected",
    [
        ({}, [5, 6, 7, 8, 9, 1], [0, 0, 0, 0, 1, 1], [5, 6, 7, 8, 10, 11, 1]),
        ({"max_length": 6}, [5, 6, 7, 8, 9, 1], [0, 0, 0, 0, 1, 1], [5, 6, 7, 8, 10, 11]),
        ({"max_length": 4}, [5, 6, 7, 8], [0, 0, 0, 0], [5, 6, 7, 8]),
        ({"max_length": 3}, [5, 6, 7], [0, 0, 0], [5, 6, 7]),
        ({"max_prompt_length": 4}, [5, 6, 7, 8, 9, 1], [0, 0, 0, 0, 1, 1], [5, 6, 7, 8, 10, 11, 1]),
        ({"max_prompt_length": 2}, [7, 8, 9, 1], [0, 0, 1, 1], [7, 8, 10, 11, 1]),
        ({"max_prompt_length": 2, "truncation_mode": "keep_start"}, [5, 6, 9, 1], [0, 0, 1, 1], [5, 6, 10, 11, 1]),
        ({"max_prompt_length": 2, "max_length": 4}, [7, 8, 9, 1], [0, 0, 1, 1], [7, 8, 10, 11]),
        ({"max_completion_length": 1}, [5, 6, 7, 8, 9], [0, 0, 0, 0, 1], [5, 6, 7, 8, 10]),
    ],
)
def test_prompts_are_cut_first_and_completions_at_their_end(
    limits: dict[str, Any], chosen: list[float], mask: list[float], rejected: list[float]
) -> None:
    assert row_of(**limits) == (chosen, mask, rejected)


def test_another_truncation_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="truncation_mode='keep'; choose one of 'keep_start', 'keep_end'"):
        reference.orpo_row(PROMPT, CHOSEN, REJECTED, truncation_mode="keep")


def test_other_readings_are_refused() -> None:
    with pytest.raises(ValueError, match="nll_mean='batch'"):
        ORPOUndecided(nll_mean="batch")


class Model(torch.nn.Module):
    """As Transformers' models return what they compute; after any token 1 has the probability 1/2, and others 1/6."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(4, 4, dtype=torch.float64)
        table[:, 1] = LOG3
        self.bigrams = Bigrams(table)

    def forward(self, **inputs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.bigrams(**inputs))


def pair(prompt: list[int], chosen: list[int], rejected: list[int]) -> dict[str, tuple[float, ...]]:
    return reference.orpo_row(prompt, chosen, rejected)


BATCH = [pair([0, 2], [1], [2, 2]), pair([0], [2, 2, 2], [1, 2])]
"""Log-probabilities of completions, each the mean of its tokens: -log 2 and -log 6; -log 6 and -(log 2 + log 6) / 2."""
MEANS = {"logps[chosen]": [-LOG2, -LOG6], "logps[rejected]": [-LOG6, -(LOG2 + LOG6) / 2]}
ROOT = math.exp(-(LOG2 + LOG6) / 2)
ODDS = [math.log(1 / (1 / 5)), math.log((1 / 5) / (ROOT / (1 - ROOT)))]
"""Odds of 1/2 are 1, and of 1/6 they are 1/5."""


def log_sigmoid(value: float) -> float:
    return -math.log(1 + math.exp(-value))


RATIO = (log_sigmoid(ODDS[0]) + log_sigmoid(ODDS[1])) / 2


def measured(beta: float = 0.5, **undecided: Any) -> reference.Measured:
    settings = ORPOSettings(beta=beta, undecided=ORPOUndecided(**undecided))
    (found,) = reference.ORPOObjective(settings)(Model(), [[BATCH]])
    return found


@pytest.mark.parametrize(
    "undecided, nll",
    [
        ({}, (LOG2 + LOG6) / 2),
        ({"nll_mean": "tokens"}, (LOG2 + 3 * LOG6) / 4),
        # The first prompt's second token has the probability 1/6, too.
        ({"nll_tokens": "sequence"}, ((LOG6 + LOG2) / 2 + LOG6) / 2),
        ({"nll_tokens": "sequence", "nll_mean": "tokens"}, (LOG2 + 4 * LOG6) / 5),
    ],
)
def test_a_loss_is_a_likelihood_and_beta_times_an_odds_ratio(undecided: dict[str, Any], nll: float) -> None:
    found = measured(**undecided)
    assert found.loss.item() == pytest.approx(nll - 0.5 * RATIO)
    total, count = found.metrics["nll_loss"]
    assert float(total) / count == pytest.approx(nll)
    assert measured(beta=0.0, **undecided).loss.item() == pytest.approx(nll)


def test_values_and_metrics() -> None:
    found = measured()
    assert {name: values.tolist() for name, values in found.values.items()} == {
        name: pytest.approx(values) for name, values in MEANS.items()
    }
    better, worse = MEANS["logps[chosen]"], MEANS["logps[rejected]"]
    margins = [one - other for one, other in zip(better, worse, strict=True)]
    expected = {
        "logps/chosen": sum(better),
        "logps/rejected": sum(worse),
        "rewards/chosen": sum(better) / 2,
        "rewards/rejected": sum(worse) / 2,
        "rewards/margins": sum(margins) / 2,
        "rewards/accuracies": 1.0,
        "log_odds_chosen": sum(ODDS),
        "log_odds_ratio": 2 * RATIO,
        "nll_loss": LOG2 + LOG6,
    }
    assert {name: float(total) for name, (total, _) in found.metrics.items()} == {
        name: pytest.approx(value) for name, value in expected.items()
    }
    assert {count for _, count in found.metrics.values()} == {2.0}


def test_a_pair_is_right_where_what_was_chosen_is_likelier() -> None:
    found = reference.ORPOObjective(ORPOSettings())(Model(), [[BATCH[:1]], [BATCH[1:]]])
    assert [float(one.metrics["rewards/accuracies"][0]) for one in found] == [1.0, 0.0]


def test_micro_batches_of_all_ranks_count_equally() -> None:
    settings = ORPOSettings(world_size=2)
    found = reference.ORPOObjective(settings)(Model(), [[BATCH, BATCH[:1]], [BATCH[:1], BATCH[1:]]])
    alone = [one.alone.item() for one in found if one.alone is not None]
    assert [one.loss.item() for one in found] == pytest.approx([loss / 4 for loss in alone])
    assert alone[0] == pytest.approx((alone[1] + alone[3]) / 2)
    assert alone[1] == alone[2] == pytest.approx(LOG2 - 0.1 * log_sigmoid(ODDS[0]))


def test_a_gradient_raises_what_was_chosen() -> None:
    model = Model()
    settings = ORPOSettings(beta=1.0)
    (found,) = reference.ORPOObjective(settings)(model, [[[pair([0], [1], [2])]]])
    found.loss.backward()
    gradient = model.bigrams.table.grad
    assert gradient is not None
    # By the logit of token 1 the log odds of token 1 have the derivative 1, and those of token 2, whose probability is
    # 1/6, -(1/2) / (1 - 1/6) = -0.6. The odds ratio is 5, its sigmoid 5/6, and L_OR has the derivative -(1 - 5/6).
    assert float(gradient[0, 1]) == pytest.approx(-(1 - 0.5) - (1 - 5 / 6) * 1.6)
