"""What is compared of a GRPO training: what rounding may move over a bound, and what reward functions are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference
from pytest_trlcompat.conformance.grpo.environments import observation
from pytest_trlcompat.conformance.grpo.quantities import _rewarded, clipped_by_rounding
from pytest_trlcompat.conformance.grpo.sampling import target_of

from .reference_models import ROWS, random_bigrams, settings_of

SETTINGS = settings_of()
LOW = "clip_ratio/low_mean"
TOKENS = 23


def step_with(ratio: float, advantages: Sequence[float]) -> Any:
    """A step in which the first token of each of eight completions has a ratio."""
    step = reference.grpo_step(random_bigrams(), ROWS, SETTINGS)
    (generation,), (batch,) = step.generations, step.micro_batches
    given = torch.tensor(list(advantages), dtype=torch.float64)
    generation = replace(generation, advantages=replace(generation.advantages, advantages=given))
    weights = torch.ones_like(batch.weights)
    weights[:, 0] = ratio
    batch = replace(batch, weights=weights)
    logs = {**step.logs, **reference.training_metrics([batch], [generation], SETTINGS)}
    return replace(step, generations=(generation,), micro_batches=(batch,), logs=logs)


def test_a_ratio_that_is_not_near_a_bound_is_counted_for_sure() -> None:
    step = step_with(0.79, [-1.0] * 4 + [1.0] * 4)
    assert step.logs[LOW] == pytest.approx(4 / TOKENS)
    assert set(clipped_by_rounding(step, SETTINGS).values()) == {0.0}


def test_of_ratios_at_a_bound_either_number_may_be_counted() -> None:
    for ratio, counted in ((0.8 * (1 + 5e-5), 0), (0.8 * (1 - 5e-5), 4)):
        step = step_with(ratio, [-1.0] * 4 + [1.0] * 4)
        assert step.logs[LOW] == pytest.approx(counted / TOKENS)
        found = clipped_by_rounding(step, SETTINGS)
        assert found[LOW] == pytest.approx(4 / TOKENS)
        assert found["clip_ratio/high_mean"] == 0.0


def test_an_advantage_of_zero_may_have_either_sign() -> None:
    step = step_with(0.5, [0.0, 0.0, *[1.0] * 6])
    assert step.logs[LOW] == 0.0
    assert clipped_by_rounding(step, SETTINGS)[LOW] == pytest.approx(2 / TOKENS)
    assert clipped_by_rounding(step_with(1.0, [0.0] * 8), SETTINGS)[LOW] == 0.0


@pytest.mark.parametrize("environments", [{}, {"environments": [[]]}])
def test_a_reward_function_is_given_the_column_of_its_prompt(environments: dict[str, Any]) -> None:
    """With the word that an environment's observation begins with; it is part of the prompt where there is none."""
    written = "w1 w2 w3" if environments else "w1 w55 w3"
    prompt = written + observation("environment", target_of(written)) if environments else written
    for off, differing in ((0, []), (1, ["reward_arguments[reward.target]"])):
        given = {"prompts": [prompt], "completions": [[5]], "target": [target_of(written) + off], **environments}
        call = SimpleNamespace(rewarded={"reward": given}, prompts=[(4,)], completions=[(5,)], sampled=[[True]])
        assert [each.stage for each in _rewarded(call, "generation 0")] == differing
