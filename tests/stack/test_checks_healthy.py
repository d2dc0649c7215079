"""Healthy trainings of many kinds: the checks must not say a word, neither of an error nor of anything odd."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.launch import NAMES, Launcher

from . import healthy_bodies as bodies
from .checks_bodies import INSTALLED, options

pytest.importorskip("trl")

FUSED_EXPERTS = stack.satisfied({"transformers": ">=5"}, INSTALLED)
ALL: dict[str, tuple[Any, str, dict[str, Any]]] = {
    **{f"trainer {strategy}": (bodies.plain, strategy, {}) for strategy in NAMES},
    **{f"lora {strategy}": (bodies.plain, strategy, {"lora": {}}) for strategy in ("single", "ddp", "zero2", "fsdp2")},
    "accumulation single": (bodies.plain, "single", {"gradient_accumulation_steps": 3}),
    "accumulation ddp": (bodies.plain, "ddp", {"gradient_accumulation_steps": 3}),
    "accumulation zero2": (bodies.plain, "zero2", {"gradient_accumulation_steps": 3}),
    "accumulation fsdp2": (bodies.plain, "fsdp2", {"gradient_accumulation_steps": 3}),
    "bf16 mixed": (bodies.plain, "single", {"bf16": True}),
    "bf16 mixed ddp": (bodies.plain, "ddp", {"bf16": True}),
    "bf16 weights, a small rate": (bodies.plain, "single", {"dtype": "bfloat16", "learning_rate": 1e-6}),
    "fp16 that overflows": (bodies.plain, "single", {"fp16": True, "max_steps": 12, "save_steps": 12}),
    "fp16 that overflows ddp": (bodies.plain, "ddp", {"fp16": True, "max_steps": 12, "save_steps": 12}),
    "fp16 zero2": (bodies.plain, "zero2", {"fp16": True, "max_steps": 24, "save_steps": 24}),
    "warm-up": (bodies.plain, "single", {"warmup_steps": 3, "lr_scheduler_type": "cosine"}),
    "constant rate": (bodies.plain, "single", {"lr_scheduler_type": "constant"}),
    "sgd": (bodies.plain, "single", {"optim": "sgd"}),
    "eight steps and more": (bodies.plain, "ddp", {"max_steps": 18, "save_steps": 18}),
    "checkpointing": (bodies.plain, "single", {"gradient_checkpointing": True}),
    "frozen embeddings": (bodies.plain, "single", {"frozen": ("embed_tokens",)}),
    "frozen layer ddp": (bodies.plain, "ddp", {"frozen": ("layers.0.",)}),
    "head alone": (bodies.plain, "single", {"frozen": ("model.",)}),
    "lora-fa": (bodies.plain, "single", {"lora": {"freeze_a": True}}),
    "dora": (bodies.plain, "single", {"lora": {"use_dora": True}}),
    "lora of another name": (bodies.plain, "single", {"lora": {"name": "policy"}}),
    "lora beside a reference": (bodies.plain, "single", {"lora": {"name": "learner", "beside": "reference"}}),
    "lora beside a reference zero2": (bodies.plain, "zero2", {"lora": {"name": "learner", "beside": "reference"}}),
    "lora beside a reference fsdp2": (bodies.plain, "fsdp2", {"lora": {"name": "learner", "beside": "reference"}}),
    "lora with a whole head": (bodies.plain, "single", {"lora": {"modules_to_save": ["lm_head"]}}),
    "merged and unmerged": (bodies.plain, "single", {"lora": {"filled": True}, "dtype": "bfloat16", "merge": True}),
    "experts": (bodies.plain, "single", {"kind": "moe"}),
    "experts ddp": (bodies.plain, "ddp", {"kind": "moe", "ddp_find_unused_parameters": True}),
    "experts that no token chose": (bodies.plain, "single", {"kind": "mixtral", "per_device_train_batch_size": 1}),
    "vision tower, text alone": (bodies.plain, "single", {"kind": "vision"}),
    "frozen vision tower": (bodies.plain, "single", {"kind": "vision", "frozen": ("visual",)}),
    "sft": (bodies.sft, "single", {}),
    "sft ddp": (bodies.sft, "ddp", {}),
    "sft experts": (bodies.sft, "single", {"kind": "moe"}),
    "dpo": (bodies.dpo, "single", {}),
    "dpo ddp": (bodies.dpo, "ddp", {}),
    "dpo zero2": (bodies.dpo, "zero2", {}),
    "reward": (bodies.reward, "single", {}),
    "reward ddp": (bodies.reward, "ddp", {}),
    "grpo": (bodies.grpo, "single", {"beta": 0.04}),
    "grpo ddp": (bodies.grpo, "ddp", {}),
    "grpo zero2": (bodies.grpo, "zero2", {}),
    "grpo accumulation": (bodies.grpo, "single", {"gradient_accumulation_steps": 2}),
    "grpo lora": (bodies.grpo, "single", {"lora": True}),
    "grpo twice over a batch": (bodies.grpo, "single", {"num_iterations": 2}),
    "grpo equal rewards first": (bodies.grpo, "single", {"equal_until": 1}),
    "grpo equal rewards for eight steps": (
        bodies.grpo,
        "single",
        {"equal_until": 9, "max_steps": 18, "save_steps": 18},
    ),
    "grpo equal rewards for ever": (bodies.grpo, "ddp", {"equal_until": 99, "max_steps": 12, "save_steps": 12}),
    "grpo experts, equal rewards first": (bodies.grpo, "single", {"kind": "moe", "equal_until": 1}),
    "grpo experts, equal rewards for eight steps": (
        bodies.grpo,
        "single",
        {"kind": "moe", "equal_until": 9, "max_steps": 18, "save_steps": 18},
    ),
}
NEEDS = {
    "grpo twice over a batch": {"trl": ">=0.16"},
    "vision tower, text alone": {"transformers": ">=4.52"},
    "frozen vision tower": {"transformers": ">=4.52"},
}


def healthy(folder: str, body: Any, settings: dict[str, Any]) -> dict[str, Any]:
    return dict(body(folder, **settings))


NOTHING_MOVED = [
    "expected training to change weights, but in 12 steps no trainable one has changed: every advantage was 0 in all "
    "batches that were looked at, as where all rewards of each group are equal"
]


@pytest.mark.parametrize("name", ALL)
def test_a_healthy_training_is_not_disturbed(launcher: Launcher, name: str, tmp_path: Path) -> None:
    body, strategy, settings = ALL[name]
    needs = NEEDS.get(name, {"transformers": ">=4.51"} if settings.get("kind") == "moe" else {})
    if not stack.satisfied(needs, INSTALLED):
        pytest.skip(f"needs {needs}")
    ranks = launcher(healthy, str(tmp_path), body, settings, strategy=strategy, options=options(strategy))
    for rank in ranks.values:
        assert rank["errors"] == []
        # Healthy as it is, a training in which nothing moved is not silent.
        assert rank["odd"] == (NOTHING_MOVED if name == "grpo equal rewards for ever" else [])
        checked = {check for check, _ in rank["checked"]}
        expected = {"trainable", "forward", "data", "steps", "schedule", "checkpoint"}
        # Where nothing comes, or DeepSpeed skips every step of so short a training, nothing can be judged.
        if "for ever" not in name and name != "fp16 zero2":
            expected |= {"gradients", "moved"}
        assert checked >= expected | ({"ranks"} if strategy != "single" else set())
        if "overflows" in name:
            norms = [entry["grad_norm"] for entry in rank["log"] if "grad_norm" in entry]
            assert not all(math.isfinite(norm) for norm in norms)  # it really does
