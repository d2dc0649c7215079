"""LlamaFactory's SFT and DPO, held against the reference: which of its differences are its own on purpose."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from .. import comparing
from ..cases import Case, marked
from .adapters import DPO, SFT
from .cases import DPO_CASES, SFT_CASES
from .settings import plain


@pytest.fixture
def settings(tiny_qwen2: Callable[..., Any], tmp_path: Path) -> Callable[[Case, str, list[Any]], dict[str, Any]]:
    """LlamaFactory's settings of a case, with its data."""

    def made(case: Case, stage: str, rows: list[Any]) -> dict[str, Any]:
        (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        columns = {"messages": "messages"}
        if stage == "dpo":
            columns |= {"chosen": "chosen", "rejected": "rejected"}
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        table = {"file_name": "rows.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
        (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {**table, "ranking": stage == "dpo"}}))
        return {
            "model_name_or_path": str(tiny_qwen2(max_position_embeddings=512).path),
            "stage": stage,
            **plain(tmp_path),
            "dataset": "rows",
            "max_steps": 2,
            "optim": "sgd",
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 100.0,
            **case.settings,
        }

    return made


def run(settings: Mapping[str, Any]) -> None:
    """What ``llamafactory-cli train`` runs in each rank."""
    from llamafactory.train.tuner import run_exp

    run_exp(dict(settings))


@marked(SFT_CASES)
def test_sft(
    case: Case, launcher: Any, tiny_qwen2: Callable[..., Any], settings: Callable[..., dict[str, Any]]
) -> None:
    rows = [{"messages": turns} for turns in comparing.conversations()]
    given, model = settings(case, "sft", rows), tiny_qwen2(max_position_embeddings=512)
    expected = comparing.conversation_rows(
        model.tokenizer,
        history=not case.settings.get("mask_history"),
        prompts=bool(case.settings.get("train_on_prompt")),
        most=case.settings.get("cutoff_len"),
    )
    comparing.check(launcher, case, functools.partial(run, given), SFT(), model, expected)


@marked(DPO_CASES)
def test_dpo(
    case: Case, launcher: Any, tiny_qwen2: Callable[..., Any], settings: Callable[..., dict[str, Any]]
) -> None:
    rows = comparing.pairs_as_messages()
    given, model = settings(case, "dpo", rows), tiny_qwen2(max_position_embeddings=512)
    other = tiny_qwen2(max_position_embeddings=512, seed=5)
    given["ref_model"] = str(other.path)
    expected = comparing.pair_rows(model.tokenizer)
    comparing.check(launcher, case, functools.partial(run, given), DPO(given, other), model, expected)
