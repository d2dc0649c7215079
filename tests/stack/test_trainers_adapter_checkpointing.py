"""Adapters learn under reentrant checkpointing in any trainer; beside a head that learns, too, nobody would notice."""

from __future__ import annotations

import math
from typing import Any

import pytest
from packaging.version import Version

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher

pytest.importorskip("trl")
pytest.importorskip("peft")


def train(model: tiny.TinyModel, folder: str, cure: bool, reentrant: bool, rows_of_a_rank: int = 2) -> dict[str, Any]:
    """Two steps of a plain Trainer on a classifier with an adapter: how far the adapter and the head moved."""
    import peft
    import torch
    import transformers.training_args
    from datasets import Dataset

    from pytest_trlcompat.trainers import cured

    # TRL's GRPOConfig adds a field to those of all arguments; that is another known issue.
    fields = getattr(transformers.training_args, "_VALID_DICT_FIELDS", [])
    fields[:] = [name for name in fields if name in transformers.TrainingArguments.__dataclass_fields__]

    torch.manual_seed(0)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(model.path, num_labels=2)
    classifier.config.pad_token_id = 0
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS", init_lora_weights=False)
    adapted = peft.get_peft_model(classifier, config)
    before = {name: weight.detach().clone() for name, weight in adapted.named_parameters() if weight.requires_grad}
    rows = [{"input_ids": [3 + row + column for column in range(6)], "labels": row % 2} for row in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        report_to="none",
        save_strategy="no",
        max_steps=2,
        per_device_train_batch_size=rows_of_a_rank,
        learning_rate=0.1,
        optim="sgd",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    cls = cured(transformers.Trainer) if cure else transformers.Trainer
    trainer = cls(model=adapted, args=arguments, train_dataset=Dataset.from_list(rows))
    trainer.train()
    after = {name: weight.detach() for name, weight in adapted.named_parameters() if name in before}
    moved = {name: (weight - before[name].to(weight.device)).norm().item() for name, weight in after.items()}
    status = [one for one in getattr(trainer, "cures", ()) if one.name == "AdapterCheckpointingMixin"]
    return {
        "adapter": math.hypot(*(size for name, size in moved.items() if "lora_" in name)),
        "head": math.hypot(*(size for name, size in moved.items() if "score" in name)),
        "active": [one.active for one in status],
    }


ASKS_ITSELF = Version(stack.installed()["transformers"]) >= Version("5")
"""Whether Transformers has the embeddings' output require gradients whenever it turns checkpointing on."""


def test_adapters_beside_a_head_learn_as_they_do_without_reentrant_checkpointing(
    launch: Launcher, tiny_qwen2: Any, tmp_path: Any
) -> None:
    model = tiny_qwen2(initializer_range=0.2)
    plain, ours, truth = (
        launch(train, model, str(tmp_path), cure, reentrant, strategy="single").values[0]
        for cure, reentrant in ((False, True), (True, True), (True, False))
    )
    assert truth["adapter"] > 1e-3 < truth["head"]
    assert (plain["adapter"] == 0) is not ASKS_ITSELF
    assert plain["head"] > 1e-3
    assert ours["adapter"] == pytest.approx(truth["adapter"], rel=1e-4)
    assert ours["head"] == pytest.approx(truth["head"], rel=1e-4)
    assert ours["active"] == [not ASKS_ITSELF]
    assert truth["active"] != [True]


def test_adapters_beside_a_head_learn_under_zero2_as_in_one_process(
    launch: Launcher, tiny_qwen2: Any, tmp_path: Any
) -> None:
    model = tiny_qwen2(initializer_range=0.2)
    alone, sharded = (
        launch(train, model, str(tmp_path), True, True, rows, strategy=strategy, world_size=size).values[0]
        for strategy, size, rows in (("single", 1, 4), ("zero2", 2, 2))
    )
    assert alone["adapter"] > 1e-3
    assert sharded["adapter"] == pytest.approx(alone["adapter"], rel=1e-4)
    assert sharded["head"] == pytest.approx(alone["head"], rel=1e-4)
