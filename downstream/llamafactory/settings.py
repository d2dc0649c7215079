"""What LlamaFactory's trainings here have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["plain"]


def plain(folder: Path) -> dict[str, Any]:
    """Settings of a short training of a whole model whose data and output are in a folder."""
    return {
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(folder),
        "cutoff_len": 64,
        "output_dir": str(folder / "out"),
        "overwrite_output_dir": True,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "preprocessing_num_workers": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "disable_gradient_checkpointing": True,
        "flash_attn": "disabled",
    }
