"""LlamaFactory's DPO by its own command and YAML file: it starts torchrun by itself where there are several devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..conftest import STRATEGIES, Known, printed_losses
from .settings import plain

KNOWN = Known()


@pytest.fixture
def config(tiny_qwen2: Callable[..., Any], pairs: Callable[..., Path], tmp_path: Path) -> Path:
    rows = pairs(
        lambda number: {
            "conversations": [{"from": "human", "value": f"w{number} w2 w3"}],
            "chosen": {"from": "gpt", "value": f"w4 w{number + 5}"},
            "rejected": {"from": "gpt", "value": f"w7 w{number + 9}"},
        }
    )
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    table = {"pairs": {"file_name": rows.name, "ranking": True, "formatting": "sharegpt", "columns": columns}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(table))
    settings = {
        "model_name_or_path": str(tiny_qwen2(max_position_embeddings=512).path),
        "stage": "dpo",
        **plain(tmp_path),
        "dataset": "pairs",
        "template": "default",
        "max_steps": 3,
        "learning_rate": 1e-3,
    }
    path = tmp_path / "dpo.yaml"
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.strategies(*STRATEGIES)
def test_dpo(trained: Callable[..., list[float]], config: Path) -> None:
    losses = trained(["llamafactory-cli", "train", config.name], KNOWN, printed_losses, cwd=config.parent)
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses[-1] != losses[0]
