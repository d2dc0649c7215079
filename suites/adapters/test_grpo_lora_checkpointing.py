"""Known issue ``grpo-lora-checkpointing`` (trl 3150, 3089): adapters that get no gradient through checkpointed layers.

Right is: at every step a finite gradient for each trainable parameter, every ``lora_B`` moved, frozen parameters
bitwise as they were, and the gradient norms of a training without checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import adapters
from ..verdicts import failure_of, unequal
from .verdicts import failures_in

if TYPE_CHECKING:
    from collections.abc import Callable

ISSUE = "grpo-lora-checkpointing"
pytestmark = pytest.mark.known_issue("grpo-lora-checkpointing")

BF16_TOLERANCE = 0.02
"""Relative, of a gradient norm: recomputed activations round as the first ones did; what is left is the sum's order."""


@pytest.mark.parametrize("strategy", adapters.CHECKPOINTED)
def test_adapters_learn(
    strategy: str, subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]
) -> None:
    def measure() -> Finding:
        group = lora_runs(subject, strategy)
        failures = failures_in(group)
        without = {name: len(run["without_gradient"]) for name, run in group.items() if not run["failure"]}
        evidence = {
            "failures": failures.first,
            **failures.of_other_ranks,
            "without_gradient": without,
            "checkpointing": {name: run.get("checkpointing") for name, run in group.items()},
            "grad_norm": {name: run.get("grad_norm") for name, run in group.items()},
        }
        failed = failure_of(ISSUE, failures.first)
        if failed:
            return Finding(failed, evidence)
        wrong = [name for name, run in group.items() if not _learned(run) or _disagrees(name, run, group)]
        return Finding(Verdict.SILENT if wrong else Verdict.OK, evidence | {"wrong": wrong})

    judge(measure, subject=subject, strategy=strategy)


def _learned(run: dict[str, Any]) -> bool:
    assert run["lora_b"] > 0
    assert len(run["grad_norm"]) == adapters.STEPS
    return not run["without_gradient"] and run["lora_b_moved"] == run["lora_b"] and not run["frozen_moved"]


def _disagrees(name: str, run: dict[str, Any], group: Mapping[str, dict[str, Any]]) -> bool:
    """Whether checkpointing was not on, or changed the gradients."""
    plain = name.partition(",")[0]
    if plain == name:
        return bool(run["checkpointing"] != "off")
    if name.endswith("not reentrant") and run["checkpointing"] != "use_reentrant=False":
        return True
    other = group[plain if plain in group else "config"]
    if name.startswith("bf16"):
        pairs = zip(run["grad_norm"], other["grad_norm"], strict=True)
        return run["checkpointing"] == "off" or any(
            left != pytest.approx(right, rel=BF16_TOLERANCE) for left, right in pairs
        )
    return run["checkpointing"] == "off" or unequal(run["grad_norm"], other["grad_norm"], relative=True)
