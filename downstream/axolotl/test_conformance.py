"""Axolotl's SFT and DPO, held against the reference: which of its differences are its own on purpose."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .. import comparing
from ..cases import Case, marked
from .adapters import DPO, SFT
from .cases import DPO_CASES, SFT_CASES
from .settings import plain


@pytest.fixture
def config(tiny_qwen2: Callable[..., Any], tmp_path: Path) -> Callable[[Case, dict[str, Any], list[Any]], Path]:
    """Axolotl's file of settings of a case, with its data."""

    def made(case: Case, own: dict[str, Any], rows: list[Any]) -> Path:
        data, folder, model = tmp_path / "rows.jsonl", tmp_path / "model", tiny_qwen2(max_position_embeddings=512)
        shutil.copytree(model.path, folder)
        words = copy.copy(model.tokenizer)
        words.padding_side = "left" if case.name.endswith("left") else "right"
        words.save_pretrained(folder)
        data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        dataset = {"path": str(data), "ds_type": "json", "split": "train", **own.pop("dataset")}
        settings: dict[str, Any] = {
            "base_model": str(folder),
            "datasets": [dataset],
            "chat_template": "tokenizer_default",
            **plain(tmp_path),
            "max_steps": 2,
            "learning_rate": 0.1,
            "max_grad_norm": 100.0,
            "optimizer": "sgd",
            **own,
            **case.settings,
        }
        if "eval_strategy" in case.settings:
            settings["test_datasets"] = [dataset]
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(settings), encoding="utf-8")
        return path

    return made


def run(path: Path) -> None:
    """What ``axolotl train`` runs in each rank."""
    from axolotl.cli.train import do_cli

    sys.argv[1:] = []
    do_cli(str(path))


@marked(SFT_CASES)
def test_sft(case: Case, launcher: Any, tiny_qwen2: Callable[..., Any], config: Callable[..., Path]) -> None:
    rows = [{"messages": turns} for turns in comparing.conversations()]
    own = {"dataset": {"type": "chat_template", "roles_to_train": ["assistant"], "train_on_eos": "turn"}}
    model = tiny_qwen2(max_position_embeddings=512)
    expected = comparing.conversation_rows(
        model.tokenizer, prompts=bool(case.settings.get("train_on_inputs")), most=case.settings.get("sequence_len")
    )
    comparing.check(launcher, case, functools.partial(run, config(case, own, rows)), SFT(), model, expected)


@marked(DPO_CASES)
def test_dpo(case: Case, launcher: Any, tiny_qwen2: Callable[..., Any], config: Callable[..., Path]) -> None:
    rows = comparing.pairs_as_messages()
    own = {"rl": "dpo", "rl_beta": 0.1, "dataset": {"type": "chat_template.default"}}
    model = tiny_qwen2(max_position_embeddings=512)
    expected = comparing.pair_rows(model.tokenizer)
    comparing.check(launcher, case, functools.partial(run, config(case, own, rows)), DPO(), model, expected)
