"""ms-swift's DPO by its own command, which starts its script in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..conftest import STRATEGIES, Known, printed_losses

_REFERENCE = (
    "Expected all tensors to be on the same device, but got self is on cpu",
    "its DPO trainer prepares the reference model for evaluation alone, which leaves it on the CPU under FSDP "
    "(accelerate 1.11: prepare_model with evaluation_mode)",
)
KNOWN = Known(broken={"fsdp1": _REFERENCE, "fsdp2": _REFERENCE})


@pytest.mark.strategies(*STRATEGIES)
def test_dpo(
    trained: Callable[..., list[float]], tiny_qwen2: Callable[..., Any], pairs: Callable[..., Path], tmp_path: Path
) -> None:
    rows = pairs(
        lambda number: {
            "messages": [
                {"role": "user", "content": f"w{number} w2 w3"},
                {"role": "assistant", "content": f"w4 w{number + 5}"},
            ],
            "rejected_response": f"w7 w{number + 9}",
        }
    )
    settings = {
        "rlhf_type": "dpo",
        "check_model": "false",  # against a hub
        "model": tiny_qwen2(max_position_embeddings=512).path,
        "model_type": "qwen2",
        "template": "dummy",
        "dataset": rows,
        "split_dataset_ratio": 0,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "train_type": "full",
        "torch_dtype": "float32",
        "bf16": "false",
        "fp16": "false",
        "attn_impl": "eager",
        "gradient_checkpointing": "false",
        "max_length": 64,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": tmp_path / "out",
    }
    words = ["swift", "rlhf", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]
    losses = trained(words, KNOWN, printed_losses, cwd=tmp_path, follow=True)
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses[-1] != losses[0]
