"""Known issue ``grpo-lora-checkpointing`` (trl 3150, 3089): adapters that reentrant checkpointing leaves without gradient.

Right is: at every step a finite gradient for each trainable parameter, every ``lora_B`` moved, frozen parameters bitwise
as they were, and the gradient norms of a training without checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.judge import Finding, Judge
from pytest_trlcompat.verdict import Verdict

from . import grpo, lora_measures
from .grpo_verdicts import failure_of, unequal

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel

ISSUE = "grpo-lora-checkpointing"
pytestmark = pytest.mark.known_issue("grpo-lora-checkpointing")

DEFAULT = {"gradient_checkpointing": True}
REENTRANT = {**DEFAULT, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
NOT_REENTRANT = {**DEFAULT, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
# Biases have no weight decay; without them a group of parameters is empty: deepspeed-empty-param-group.
BIASES = {"bias": "lora_only"}

# Strategy label -> variants that are judged together, each against the one of its group without checkpointing.
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "single": {
        "model": {"passed": "model"},
        "model, default": {"passed": "model", **DEFAULT},
        "model, reentrant": {"passed": "model", **REENTRANT},
        "config": {"passed": "config"},
        "config, default": {"passed": "config", **DEFAULT},
        "config, reentrant": {"passed": "config", **REENTRANT},
        "bf16": {"passed": "config", "bf16": True},
        "bf16, default": {"passed": "config", "bf16": True, **DEFAULT},
    },
    "single-not_reentrant": {
        "model": {"passed": "model"},
        "model, not reentrant": {"passed": "model", **NOT_REENTRANT},
        "config": {"passed": "config"},
        "config, not reentrant": {"passed": "config", **NOT_REENTRANT},
    },
    "single-head": {
        "config": {"passed": "config", "head": True},
        "config, default": {"passed": "config", "head": True, **DEFAULT},
    },
    "zero2": {
        "model": {"passed": "model", **BIASES},
        "model, default": {"passed": "model", **BIASES, **DEFAULT},
        "config, default": {"passed": "config", **BIASES, **DEFAULT},
    },
    "zero3": {
        "config": {"passed": "config", **BIASES},
        "config, default": {"passed": "config", **BIASES, **DEFAULT},
        "model, default": {"passed": "model", **BIASES, **DEFAULT},
    },
}
BF16_TOLERANCE = 0.02
"""Relative, of a gradient norm: recomputed activations round as the first ones did; what is left is the sum's order."""


@pytest.fixture(scope="module")
def trainings(launcher: Launcher, saved_qwen2: TinyModel) -> Callable[[str, str], list[dict[str, Any]]]:
    """What each rank measured, by subject and strategy: one launch for all variants of a strategy."""
    known: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def run(subject: str, strategy: str) -> list[dict[str, Any]]:
        if (subject, strategy) not in known:
            groups = {label: group for label, group in VARIANTS.items() if label.partition("-")[0] == strategy}
            variants = {f"{label}: {name}": made for label, group in groups.items() for name, made in group.items()}
            body = lora_measures.lora_trainings
            result = launcher(body, subject, saved_qwen2, variants, strategy=strategy, sharded=False)
            known[subject, strategy] = result.values
        return known[subject, strategy]

    return run


@pytest.mark.parametrize("strategy", VARIANTS)
def test_adapters_learn(
    strategy: str, subject: str, judge: Judge, trainings: Callable[[str, str], list[dict[str, Any]]]
) -> None:
    def measure() -> Finding:
        ranks = trainings(subject, strategy.partition("-")[0])
        group = {name: ranks[0][f"{strategy}: {name}"] for name in VARIANTS[strategy]}
        failures = {name: run["failure"] for name, run in group.items() if run["failure"]}
        without = {name: len(run["without_gradient"]) for name, run in group.items() if not run["failure"]}
        evidence = {
            "failures": failures,
            "without_gradient": without,
            "checkpointing": {name: run.get("checkpointing") for name, run in group.items()},
            "grad_norm": {name: run.get("grad_norm") for name, run in group.items()},
        }
        failed = failure_of(ISSUE, failures)
        if failed:
            return Finding(failed, evidence)
        wrong = [name for name, run in group.items() if not _learned(run) or _disagrees(name, run, group)]
        return Finding(Verdict.SILENT if wrong else Verdict.OK, evidence | {"wrong": wrong})

    judge(measure, subject=subject, strategy=strategy)


def _learned(run: dict[str, Any]) -> bool:
    assert run["lora_b"] > 0
    assert len(run["grad_norm"]) == grpo.STEPS
    return not run["without_gradient"] and run["lora_b_moved"] == run["lora_b"] and not run["frozen_moved"]


def _disagrees(name: str, run: dict[str, Any], group: Mapping[str, dict[str, Any]]) -> bool:
    """Whether checkpointing was not on, or changed the gradients."""
    plain = name.partition(",")[0]
    if plain == name:
        return bool(run["checkpointing"] != "off")
    other = group.get(plain, next(iter(group.values())))
    if name.startswith("bf16"):
        pairs = zip(run["grad_norm"], other["grad_norm"], strict=True)
        return run["checkpointing"] == "off" or any(
            left != pytest.approx(right, rel=BF16_TOLERANCE) for left, right in pairs
        )
    return run["checkpointing"] == "off" or unequal(run["grad_norm"], other["grad_norm"], relative=True)
