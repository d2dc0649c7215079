"""reasoning-gym's GRPO example, a script with its own trainer: part of its repository, and of no release."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..conftest import STRATEGIES, Known, printed_losses

VARIABLE = "TRLCOMPAT_REASONING_GYM"
KNOWN = Known(
    broken={
        "fsdp1": (
            "'weight' must be 2-D",
            "TRL 0.15.2 generates under FSDP1 with weights that are not gathered: grpo-fsdp-generation",
        ),
        "fsdp2": (
            "When using FSDP2, a model and optimizer must be passed together",
            "Transformers 4.49 prepares the model alone, and does not know FSDP2",
        ),
    }
)


@pytest.fixture
def script() -> Path:
    """In a clone, which the variable names."""
    clone = os.environ.get(VARIABLE)
    if not clone:
        pytest.skip(f"needs a clone of reasoning-gym, named by {VARIABLE}")
    return Path(clone) / "examples" / "trl" / "grpo.py"


@pytest.mark.strategies(*STRATEGIES)
def test_grpo(
    trained: Callable[..., list[float]], tiny_qwen2: Callable[..., Any], script: Path, tmp_path: Path
) -> None:
    settings = {
        "dataset_size": 16,
        "developer_prompt": "DeepSeekZero",
        "developer_role": "system",
        "datasets": {"chain_sum": {"weight": 1}},
        "model_name_or_path": str(tiny_qwen2(max_position_embeddings=1024).path),
        "attn_implementation": "eager",
        "output_dir": str(tmp_path / "out"),
        "bf16": True,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_prompt_length": 32,
        "max_completion_length": 8,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
    }
    (tmp_path / "grpo.yaml").write_text(json.dumps(settings))
    losses = trained(["python", str(script), "--config", "grpo.yaml"], KNOWN, printed_losses, cwd=tmp_path)
    assert len(losses) == settings["max_steps"]
