"""TRL's own commands, ``trl sft``, ``trl dpo`` and ``trl grpo``, which call Accelerate's launcher in their process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack

from ..conftest import STRATEGIES, Known, printed_losses

SETTINGS = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "gradient_checkpointing": False,
}
ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "sft": lambda number: {"text": f"w{number} w2 w3 w4 w5"},
    "dpo": lambda number: {
        "prompt": f"w{number} w2 w3",
        "chosen": f"w4 w{number + 5}",
        "rejected": f"w7 w{number + 9}",
    },
    "grpo": lambda number: {"prompt": [{"role": "user", "content": f"w{number} w2 w3"}]},
}
MORE: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {},
    "grpo": {"reward_funcs": ["think_format_reward"], "num_generations": 2, "max_completion_length": 8, "beta": 0.1},
}
_REFERENCE = Known(
    broken={
        "fsdp1": (
            "Inconsistent compute device and `device_id`",
            "each rank loads the reference model onto the first device: https://github.com/oumi-ai/oumi/pull/2673",
        )
    }
    if stack.satisfied({"trl": ">=0.26"}, stack.installed())
    else {"fsdp2": ("KeyError: True", "the reference model is wrapped by FSDP1 under FSDP2: dpo-fsdp-ref-model")}
)
KNOWN = {"sft": Known(), "dpo": _REFERENCE, "grpo": _REFERENCE}


@pytest.mark.strategies(*STRATEGIES)
@pytest.mark.parametrize("trainer", ["sft", "dpo", "grpo"])
def test_it_trains(
    trained: Callable[..., list[float]],
    tiny_qwen2: Callable[..., Any],
    pairs: Callable[..., Path],
    tmp_path: Path,
    trainer: str,
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    pairs(ROWS[trainer]).rename(data / "train.jsonl")
    settings = {
        **SETTINGS,
        **MORE[trainer],
        "model_name_or_path": str(tiny_qwen2().path),
        "dataset_name": str(data),
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    words = ["trl", trainer, "--config", "config.yaml"]
    losses = trained(words, KNOWN[trainer], printed_losses, cwd=tmp_path)
    assert len(losses) == SETTINGS["max_steps"]
    if trainer == "dpo":
        assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    if trainer != "grpo":  # whose rewards are all the same, since a tiny model does not think
        assert losses[-1] != losses[0]
