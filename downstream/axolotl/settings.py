"""What axolotl's trainings here have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["plain"]


def plain(folder: Path) -> dict[str, Any]:
    """Settings of a short training in float32 that prepares its data and writes into a folder."""
    return {
        "dataset_prepared_path": str(folder / "prepared"),
        "dataset_num_proc": 1,
        "special_tokens": {"pad_token": "<pad>"},
        "sequence_len": 64,
        "output_dir": str(folder / "out"),
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "lr_scheduler": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "gradient_checkpointing": False,
        "attn_implementation": "eager",
    }
