"""Axolotl's DPO by its own command, which starts ``accelerate launch`` by itself, and by the module that this runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..conftest import STRATEGIES, Known, printed_losses
from .settings import plain

KNOWN = Known(
    untestable={
        "fsdp2": (
            "has no attribute '_cuda_setDevice'",
            "axolotl makes a device mesh of CUDA under FSDP2, whatever the device is",
        )
    }
)
FSDP = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": "Qwen2DecoderLayer",
    "state_dict_type": "FULL_STATE_DICT",
    "use_orig_params": True,
    "sync_module_states": True,
}


@pytest.fixture
def config(tiny_qwen2: Callable[..., Any], pairs: Callable[..., Path], tmp_path: Path, strategy_launcher: Any) -> Path:
    """Under FSDP it says so itself, as its users do: it places models otherwise where it does not know of it."""
    rows = pairs(
        lambda number: {
            "system": "",
            "question": f"w{number} w2 w3",
            "chosen": f"w4 w{number + 5}",
            "rejected": f"w7 w{number + 9}",
        }
    )
    settings: dict[str, Any] = {
        "base_model": str(tiny_qwen2(max_position_embeddings=512).path),
        "rl": "dpo",
        "rl_beta": 0.1,
        "datasets": [{"path": str(rows), "ds_type": "json", "split": "train", "type": "chatml.intel"}],
        **plain(tmp_path),
        "max_steps": 3,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
    }
    if strategy_launcher.strategy.startswith("fsdp"):
        settings |= {"fsdp_version": int(strategy_launcher.strategy[-1]), "fsdp_config": FSDP}
    path = tmp_path / "dpo.yaml"
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.strategies(*STRATEGIES)
@pytest.mark.parametrize("words", [["axolotl", "train"], ["python", "-m", "axolotl.cli.train"]], ids=["cli", "module"])
def test_dpo(trained: Callable[..., list[float]], config: Path, words: list[str]) -> None:
    losses = trained([*words, config.name], KNOWN, printed_losses, cwd=config.parent)
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses[-1] != losses[0]
