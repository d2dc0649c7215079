"""The cure of checkpoints whose weights have other names than the model's: what a real ``Trainer`` loads with it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.trainers import CheckpointNamesMixin, CureError
from pytest_trlcompat.trainers.checkpoints.checkpoint_names import load_weights, saved_names

IDS = list(range(5, 13))
EXPERTS_RENAMED = stack.satisfied({"transformers": ">=5"}, stack.installed())
VISION_RENAMED = stack.satisfied({"transformers": ">=4.52"}, stack.installed())
KINDS = [
    pytest.param("moe", EXPERTS_RENAMED, id="experts"),
    pytest.param("vlm", VISION_RENAMED, id="vision"),
    pytest.param("qwen2", False, id="plain"),
]


def new(kind: str, seed: int = 0) -> Any:
    if kind == "moe" and not stack.satisfied({"transformers": ">=4.51"}, stack.installed()):
        pytest.skip("this release of Transformers has no such model")
    return getattr(tiny, kind)(num_hidden_layers=1, seed=seed, **({"num_experts": 4} if kind == "moe" else {})).model


def saved(model: Any, folder: Path, **how: Any) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.save_pretrained(folder, **how)
    return folder


def distance(one: Any, other: Any) -> float:
    return max(
        float((a.detach() - b.detach()).abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def trainer(cls: type, model: Any, folder: Path, **more: Any) -> Any:
    from datasets import Dataset
    from transformers import TrainingArguments, training_args

    # TRL 0.17 adds fields of its own to those that Transformers looks for (trl-training-arguments).
    looked_for = getattr(training_args, "_VALID_DICT_FIELDS", ())
    added = {name for name in looked_for if not hasattr(TrainingArguments, name)}
    kind: Any = type("Arguments", (TrainingArguments,), dict.fromkeys(added)) if added else TrainingArguments
    rows = Dataset.from_list([{"input_ids": IDS, "labels": IDS}] * 8)
    args = kind(str(folder), report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=0.1, **more)
    return cls(model, args, train_dataset=rows, eval_dataset=rows)


def cured() -> type:
    from transformers import Trainer

    return type("Cured", (CheckpointNamesMixin, Trainer), {})


@pytest.mark.parametrize(("kind", "renamed"), KINDS)
@pytest.mark.parametrize("how", [{}, {"max_shard_size": "20KB"}], ids=["whole", "sharded"])
def test_every_weight_of_a_checkpoint_is_loaded(kind: str, renamed: bool, how: Any, tmp_path: Path) -> None:
    from transformers import Trainer

    right = new(kind)
    folder = saved(right, tmp_path / "checkpoint", **how)
    assert (folder / "model.safetensors.index.json").is_file() == bool(how)
    plain = trainer(Trainer, new(kind), tmp_path)
    plain._load_from_checkpoint(str(folder))
    assert distance(plain.model, right) == pytest.approx(1.0 if renamed else 0.0)
    mended = trainer(cured(), new(kind), tmp_path)
    assert mended._activity(type(mended), mended).active is None
    mended._load_from_checkpoint(str(folder))
    assert distance(mended.model, right) == 0.0
    activity = mended._activity(type(mended), mended)
    assert activity.active is renamed, activity


@pytest.mark.parametrize(("kind", "renamed"), KINDS[:1])
def test_a_training_ends_with_the_best_model(kind: str, renamed: bool, tmp_path: Path) -> None:
    """Evaluations are made up, each worse than the one before, so that the first checkpoint is the best."""
    from transformers import Trainer

    ended = {}
    for cls in (Trainer, cured()):
        schedule = {
            "max_steps": 2,
            "save_steps": 1,
            "eval_steps": 1,
            "save_strategy": "steps",
            "eval_strategy": "steps",
        }
        mine = trainer(cls, new(kind), tmp_path / cls.__name__, load_best_model_at_end=True, **schedule)
        losses = itertools.count(1)
        mine.evaluate = lambda *_, losses=losses, **__: {"eval_loss": float(next(losses))}
        mine.train()
        assert mine.state.best_model_checkpoint.endswith("checkpoint-1")
        best = type(mine.model).from_pretrained(mine.state.best_model_checkpoint)
        ended[cls.__name__] = distance(mine.model, best)
    assert ended["Cured"] == 0.0
    assert (ended["Trainer"] > 0.01) == renamed, ended


@pytest.mark.skipif(not EXPERTS_RENAMED, reason="names are the model's")
def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(new("moe"), tmp_path / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in weights if ".experts." not in name and "norm" in name)
    del weights[lost]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    mended = trainer(cured(), new("moe"), tmp_path)
    with pytest.raises(
        CureError, match=f"^CheckpointNamesMixin with .*: looked for all weights of Q.* in .*, but {lost} is"
    ):
        mended._load_from_checkpoint(str(folder))


def test_names_are_read_from_any_file_that_transformers_writes(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2), "b.c": torch.zeros(3)}
    assert saved_names(tmp_path) == frozenset()
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"d": "file", "e": "file"}}))
    assert saved_names(tmp_path) == {"d", "e"}
    for zipped in (True, False):
        torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        assert saved_names(tmp_path) == {"a", "b.c"}


def test_random_numbers_are_those_of_before(tmp_path: Path) -> None:
    model = new("vlm")
    folder = saved(new("vlm"), tmp_path)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    load_weights(model, folder)
    assert torch.equal(torch.get_rng_state(), before)
