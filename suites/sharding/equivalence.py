"""Whether a training on several ranks is the training of a single process: losses, gradient norms, weights.

Runs in the test process. The completions depend on the row alone, so that the batch of a
step is the same on however many ranks; what is left is the order of float32 sums, and the tolerances are for that. Sums
of the few thousand terms of a loss or a gradient differ by some 1e-7 of themselves in another order, and two steps
of SGD add up such differences; 6e-8, 4e-7 and 2e-7 were seen at most. The mildest known bug is off by 1e-2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding

from ..in_rank.sharding import STEPS
from .trainings import greatest_difference

if TYPE_CHECKING:
    from .trainings import Trainings

__all__ = ["judge_equivalence"]

LOSS_TOLERANCE = 1e-6
"""Absolute, of losses between 0 and 0.1."""
GRAD_NORM_TOLERANCE = 1e-5
"""Relative."""
WEIGHT_TOLERANCE = 2e-6
"""Absolute, of weights up to 1.2, of which some move by 4e-2."""
SIGNIFICANT = 1e-3
"""How far weights and losses must move, so that equality says something."""


def judge_equivalence(trained: Trainings, subject: str, strategy: str) -> Finding:
    """``ok`` where losses, gradient norms and weights are those of a single process, ``silent`` where one is not."""
    alone, training = trained.single(subject, strategy), trained(subject, strategy)
    # A failure in one process says nothing about sharing.
    if alone.failure is not None:
        return Finding(Verdict.ERROR, {"failure": alone.failure})
    if training.failure is not None or training.first["gathering"] is not None:
        return Finding(
            Verdict.ERROR,
            {"failure": training.failure, "gathering": training.first["gathering"], **training.failures_of_other_ranks},
        )
    first, expected = training.first, alone.first
    evidence = {
        "losses": training.losses,
        "losses_single": alone.losses,
        "grad_norm": first["grad_norm"],
        "grad_norm_single": expected["grad_norm"],
        "weights_moved_by": greatest_difference(expected["policy"], expected["initial"]),
        "weights_off_by": greatest_difference(first["policy"], expected["policy"]),
    }
    assert len(expected["grad_norm"]) == STEPS
    assert evidence["weights_moved_by"] > SIGNIFICANT
    assert max(alone.losses) > SIGNIFICANT
    right = (
        training.losses == pytest.approx(alone.losses, abs=LOSS_TOLERANCE)
        and first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=GRAD_NORM_TOLERANCE)
        and evidence["weights_off_by"] <= WEIGHT_TOLERANCE
    )
    return Finding(Verdict.OK if right else Verdict.SILENT, evidence)
