"""What entries state in ``when``, held against the settings of the suites that show them, and against their opposite.

Each line is a training as its suite makes it, which the issue bites, and one that differs in a single setting, which it
does not bite, or of which that cannot be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.doctor.biting import bites
from pytest_trlcompat.training import defaults
from pytest_trlcompat.training.answers import Bite
from pytest_trlcompat.training.training import Training

CATALOG = known_issues.load()
BITES, OPEN, NOT = Bite.BITES, Bite.CANNOT_TELL, Bite.DOES_NOT
LORA = {"adapter.type": "lora", "adapter.bias": "none", "adapter.saves_head": False}
CHECKPOINTED = {**LORA, "parallel.strategy": "single", "gradient_checkpointing": True}
NOT_REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
ZERO = {"parallel.strategy": "zero2", "optimizer.deepspeed": None}
FP32 = {"parallel.strategy": "zero1", "bf16": True, "engine.gradient_sums": "fp32"}
BFD = {"packing": True, "packing_strategy": "bfd"}
PEFT_CONFIG = {**LORA, "adapter.made_by": "trainer"}
REWARD = {**LORA, "adapter.task_type": None, "parallel.strategy": "single"}


def _bite(issue: str, label: str, release: str, values: Mapping[str, Any]) -> Bite:
    known = CATALOG[issue]
    trainer = known.trainer or (known.trainers[0] if known.trainers else "grpo")
    return bites(known, [label], Training(trainer, values, whole=True), defaults.of(trainer, release)).bite


@pytest.mark.parametrize(
    ("issue", "label", "release", "measured", "changed", "bite"),
    [
        ("deepspeed-empty-param-group", "zero2", "1.0.0", {**LORA, **ZERO}, {"adapter.bias": "all"}, NOT),
        ("deepspeed-empty-param-group", "zero2", "1.0.0", {**LORA, **ZERO}, {"adapter.type": None}, NOT),
        ("deepspeed-empty-param-group", "zero2", "1.0.0", {**LORA, **ZERO}, {"parallel.strategy": "ddp"}, NOT),
        ("deepspeed-fp32-sums", "zero1", "1.0.0", FP32, {"engine.gradient_sums": None}, NOT),
        ("deepspeed-fp32-sums", "zero1", "1.0.0", FP32, {"parallel.strategy": "zero2"}, NOT),
        ("deepspeed-fp32-sums", "zero1", "1.0.0", FP32, {"bf16": False}, NOT),
        ("dpo-changed-base", "single", "1.16.0", {**PEFT_CONFIG, "adapter.init": "pissa"}, {"adapter.init": True}, NOT),
        (
            "dpo-changed-base",
            "single",
            "1.16.0",
            {**PEFT_CONFIG, "adapter.init": "olora"},
            {"adapter.init": "gaussian"},
            NOT,
        ),
        ("reward-adapter-head", "single", "1.16.0", REWARD, {"adapter.task_type": "SEQ_CLS"}, NOT),
        ("reward-adapter-head", "single", "1.16.0", REWARD, {"adapter.saves_head": True}, NOT),
        ("reward-adapter-head", "single", "1.16.0", REWARD, {"adapter.type": None}, NOT),
        ("grpo-fsdp-generation", "fsdp1", "0.17.0", {"parallel.strategy": "fsdp1"}, {"use_vllm": True}, NOT),
        ("lora-fsdp2-generation", "fsdp2", "1.0.0", {**LORA, "parallel.strategy": "fsdp2"}, {"use_vllm": True}, NOT),
        (
            "lora-fsdp2-generation",
            "fsdp2",
            "1.0.0",
            {**LORA, "parallel.strategy": "fsdp2"},
            {"adapter.type": None},
            NOT,
        ),
        ("grpo-checkpointed-generation", "single", "0.17.0", CHECKPOINTED, {"use_vllm": True}, NOT),
        ("grpo-checkpointed-generation", "single", "0.17.0", CHECKPOINTED, {"gradient_checkpointing": False}, NOT),
        ("grpo-lora-checkpointing", "single", "0.15.2", CHECKPOINTED, NOT_REENTRANT, NOT),
        ("grpo-lora-checkpointing", "single", "0.15.2", CHECKPOINTED, {"adapter.type": None}, NOT),
        (
            "grpo-lora-checkpointing",
            "single-not_reentrant",
            "0.22.2",
            {**CHECKPOINTED, **NOT_REENTRANT},
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
            NOT,
        ),
        (
            "ppo-lr-scheduler-zip",
            "zero2",
            "0.17.0",
            {**ZERO, "model.family": "mistral"},
            {"model.family": "gpt2"},
            OPEN,
        ),
        ("sft-padding-free-labels", "single", "0.21.0", {"padding_free": True}, {"padding_free": False}, NOT),
        ("sft-padding-free-labels", "single", "0.21.0", BFD, {"packing_strategy": "wrapped"}, NOT),
        (
            "sft-padding-free-width",
            "single",
            "0.21.0",
            {"padding_free": True, "pad_to_multiple_of": 8},
            {"pad_to_multiple_of": None},
            NOT,
        ),
        ("sft-packing-bins", "single", "0.21.0", {**BFD, "max_length": 100}, {"max_length": 1024}, NOT),
        ("sft-packing-bins", "single", "0.21.0", {**BFD, "max_length": 24}, {"packing_strategy": "wrapped"}, NOT),
    ],
)
def test_what_a_suite_shows_bites_and_its_opposite_does_not(
    issue: str, label: str, release: str, measured: Mapping[str, Any], changed: Mapping[str, Any], bite: Bite
) -> None:
    strategy = {} if "parallel.strategy" in measured else {"parallel.strategy": "single"}
    assert _bite(issue, label, release, {**strategy, **measured}) is BITES
    assert _bite(issue, label, release, {**strategy, **measured, **changed}) is bite


@pytest.mark.parametrize(
    ("issue", "values"),
    [("reward-adapter-head", REWARD), ("dpo-changed-base", {**PEFT_CONFIG, "adapter.init": "pissa"})],
)
def test_what_every_strategy_shows_bites_a_training_that_names_none(issue: str, values: Mapping[str, Any]) -> None:
    known = CATALOG[issue]
    silent = {axis: value for axis, value in values.items() if axis != "parallel.strategy"}
    training = Training(known.trainer, silent, whole=True)
    assert bites(known, known.labels(), training, defaults.of(known.trainer, "1.16.0")).bite is BITES
    assert bites(known, ["single", "ddp"], training, defaults.of(known.trainer, "1.16.0")).bite is OPEN
