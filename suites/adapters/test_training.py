"""Whether adapters learn: with checkpointing, in mixed precision, and beside biases and whole modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import adapter_saving, adapters, dpo
from ..measured import every
from ..sharding.trainings import built_as_asked
from ..verdicts import failure_of, unequal
from .trainings import as_in_one_process, failures_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache
    from ..settings.trainings import SettingTrainings
    from .trainings import AdapterTrainings

BF16_TOLERANCE = 0.02
"""Relative, of a gradient norm: recomputed activations round as the first ones did; what is left is the sum's order."""


FIRST_LOSS_TOLERANCE = 1e-3
"""Absolute, of log 2: releases log four digits. The loss of another reference is off by 1 and more."""


@pytest.mark.known_issue("dpo-changed-base")
def test_reference_of_changed_base(
    subject: str, judge: Judge, launches: LaunchCache, tiny_qwen2: Callable[..., TinyModel]
) -> None:
    """The reference of DPO is the base of an adapter whose start has changed it.

    Right is: before the first update policy and reference are one model, so that the loss is log 2 and the margins are
    0, however the adapter starts.
    """

    def measure() -> Finding:
        model = tiny_qwen2(initializer_range=0.5)
        (run,) = launches(dpo.first_losses, subject, model, strategy="single").values
        if (failed := failure_of(judge.issue.id, {"training": run["failure"]} if run["failure"] else {})) is not None:
            return Finding(failed, run)
        plain, *others = run["losses"]
        log_2 = pytest.approx(math.log(2), abs=FIRST_LOSS_TOLERANCE)
        assert plain == log_2, "of an adapter that begins as nothing"
        right = every(loss == log_2 for loss in others)
        return Finding(Verdict.OK if right else Verdict.SILENT, {"starts": dpo.STARTS, **run})

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-lora-checkpointing")
@pytest.mark.parametrize("strategy", adapters.CHECKPOINTED)
def test_checkpointing(
    strategy: str, subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]
) -> None:
    """Adapters that get no gradient through checkpointed layers (trl 3150, 3089).

    Right is: at every step a finite gradient for each trainable parameter, every ``lora_B`` moved, frozen parameters
    bitwise as they were, and the gradient norms of a training without checkpointing.
    """

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
        failed = failure_of(judge.issue.id, failures.first)
        if failed:
            return Finding(failed, evidence)
        wrong = [name for name, run in group.items() if not _learned(run) or _disagrees(name, run, group)]
        return Finding(Verdict.SILENT if wrong else Verdict.OK, evidence | {"wrong": wrong})

    judge(measure, subject=subject, strategy=strategy)


@pytest.mark.known_issue("lora-zero3-checkpointing")
def test_checkpointing_under_zero3(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    """Adapters cannot be trained under ZeRO-3 (trl 2514, transformers 47254).

    Right is: with gradient checkpointing as TRL turns it on, the gradient norms of a training without it, and adapters
    that learn.
    """

    def measure() -> Finding:
        group = lora_runs(subject, "zero3")
        failures = failures_in(group)
        evidence = {
            "failures": failures.first,
            **failures.of_other_ranks,
            "checkpointing": {name: run.get("checkpointing") for name, run in group.items()},
            "grad_norm": {name: run.get("grad_norm") for name, run in group.items()},
        }
        failed = failure_of(judge.issue.id, failures.first)
        if failed:
            return Finding(failed, evidence)
        right = every(_agrees_with_plain(run, group["config"]) for name, run in group.items() if name != "config")
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="zero3")


@pytest.mark.known_issue("lora-ddp-checkpointing")
def test_reentrant_checkpointing_under_ddp(subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    """Adapters, DDP and reentrant checkpointing.

    Right is: GRPO trains as in a single process, see :mod:`suites.settings.equivalence`.
    """
    setting_trainings.judge_row(judge, subject, "ddp-peft_config-checkpointing")


@pytest.mark.known_issue("deepspeed-mixed-dtypes")
def test_mixed_dtypes_under_zero3(subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    """A float32 adapter on a bfloat16 model under ZeRO-3 (deepspeed 8073).

    Right is: GRPO trains as in a single process, see :mod:`suites.settings.equivalence`.
    """
    setting_trainings.judge_row(judge, subject, "zero3-bf16_weights-peft_config")


@pytest.mark.known_issue("lora-fsdp-bf16-generation")
def test_bf16_generation_under_fsdp1(subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    """A float32 adapter beneath FSDP1's root, in mixed precision.

    Right is: GRPO trains as in a single process, see :mod:`suites.settings.equivalence`.
    """
    setting_trainings.judge_row(judge, subject, "fsdp1-bf16-peft_config")


@pytest.mark.known_issue("lora-fsdp2-generation")
def test_generation_under_fsdp2(subject: str, judge: Judge, adapter_trainings: AdapterTrainings) -> None:
    """GRPO cannot generate with adapters that FSDP2 shards (trl 4550).

    Right is: the gradient norms of a training in one process.
    """

    def measure() -> Finding:
        training = adapter_trainings(subject, "fsdp2")
        run, expected = training.first, adapter_trainings("corrected", "single").first
        failures = training.failures("training")
        failure = failures.first.get("training")
        built_as_asked("fsdp2", training.engines, failure)
        evidence = {
            "failure": failure,
            **failures.of_other_ranks,
            "grad_norm": run["grad_norm"],
            "single": expected["grad_norm"],
        }
        if failed := failure_of(judge.issue.id, failures.first):
            return Finding(failed, evidence)
        assert len(expected["grad_norm"]) == adapter_saving.STEPS
        wrong = unequal(run["grad_norm"], expected["grad_norm"], relative=True)
        return Finding(Verdict.SILENT if wrong else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="fsdp2")


@pytest.mark.known_issue("grpo-lora-stale-trace")
def test_one_forward_under_zero3(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    """A record of modules that were numbered anew (trl 4693, deepspeed 8043).

    Right is: an adapter trains under ZeRO-3 without a reference model, where a step has one forward, and every gradient
    norm and the weights are those of the corrected trainer in one process.
    """

    def measure() -> Finding:
        run = lora_runs(subject, "zero3-one_forward")["config"]
        expected = lora_runs("corrected", "single-one_forward")["config"]
        return as_in_one_process(judge.issue.id, run, expected, adapters.ONE_FORWARD["steps"])

    judge(measure, subject=subject, strategy="zero3")


@pytest.mark.known_issue("lora-zero3-biases")
def test_biases_under_zero3(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    """The gradient of a bias whose weight is frozen, under ZeRO-3 (deepspeed 7435).

    Right is: an adapter learns together with the biases beside it, with a finite gradient for each, and the gradient
    norm and the weights after a step are those of the corrected trainer in one process.
    """

    def measure() -> Finding:
        run = lora_runs(subject, "zero3-biases")["config"]
        expected = lora_runs("corrected", "single-biases")["config"]
        assert expected["trainable"] > 2 * expected["lora_b"], "biases beside the two halves of each adapter"
        return as_in_one_process(judge.issue.id, run, expected, adapters.BIASES["steps"])

    judge(measure, subject=subject, strategy="zero3")


@pytest.mark.known_issue("lora-zero3-whole-modules")
def test_whole_modules_under_zero3(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    """Modules that learn whole beside an adapter (deepspeed 7203, 7615).

    Right is: the output head learns together with the adapter, with a finite gradient for each, and the gradient norms
    and the weights are those of the corrected trainer in one process.
    """

    def measure() -> Finding:
        run = lora_runs(subject, "zero3-whole")["config"]
        expected = lora_runs("corrected", "single-whole")["config"]
        assert expected["trainable"] == 2 * expected["lora_b"] + 1, "the head beside the two halves of each adapter"
        return as_in_one_process(judge.issue.id, run, expected, adapters.STEPS)

    judge(measure, subject=subject, strategy="zero3")


def _learned(run: dict[str, Any]) -> bool:
    assert run["lora_b"] > 0
    assert len(run["grad_norm"]) == adapters.STEPS
    return not run["without_gradient"] and run["lora_b_moved"] == run["lora_b"] and not run["frozen_moved"]


def _disagrees(name: str, run: dict[str, Any], group: Mapping[str, dict[str, Any]]) -> bool:
    """Whether checkpointing was not on, or changed the gradients."""
    # A name of a variant says what is passed and, after a comma, how it is checkpointed.
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


def _agrees_with_plain(run: dict[str, Any], plain: dict[str, Any]) -> bool:
    assert len(plain["grad_norm"]) == adapters.STEPS
    return (
        plain["checkpointing"] == "off" != run["checkpointing"]
        and run["lora_b_moved"] == run["lora_b"] > 0
        and not unequal(run["grad_norm"], plain["grad_norm"], relative=True)
    )
