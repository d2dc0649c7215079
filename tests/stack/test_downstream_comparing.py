"""What holds real projects' trainings against the reference, with a program of our own in a project's place."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from downstream import comparing
from downstream.axolotl.adapters import SFT
from downstream.cases import Case, Differs
from pytest_trlcompat import tiny
from pytest_trlcompat.conformance.training import own_fields
from pytest_trlcompat.launch import Launcher

TRAINED = Differs("gradients", r"(gradients|weights)\[.*\]|logs\[(grad_norm|loss)\]", "on purpose")


def program(model: tiny.TinyModel, factor: float, folder: str) -> None:
    """A Trainer with a loss of its own, of a class that nobody sees; at its end ranks exchange no messages any more."""
    import torch.distributed as dist
    import transformers

    class Project(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * factor

        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(*args, **kwargs)

    rows = comparing.conversation_rows(model.tokenizer)
    with own_fields(transformers.TrainingArguments):
        arguments = transformers.TrainingArguments(
            **{"output_dir": folder, "per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1},
            **{"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 100.0},
            **{"report_to": "none", "save_strategy": "no", "disable_tqdm": True},
        )
    trainer = Project(
        model=model.new_model(),
        args=arguments,
        train_dataset=[{name: list(values) for name, values in row.items()} for row in rows],
        data_collator=transformers.DataCollatorForSeq2Seq(model.tokenizer),
    )
    trainer.train()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def held(launcher: Launcher, tmp_path: Path) -> Any:
    """Trains with the loss times a factor, and holds that against the reference."""
    model = tiny.qwen2(initializer_range=0.3, num_hidden_layers=1, directory=tmp_path / "model")
    rows = comparing.conversation_rows(model.tokenizer)

    def hold(factor: float, known: tuple[Differs, ...] = (), strategy: str = "single", rows: Any = rows) -> None:
        run = functools.partial(program, model, factor, str(tmp_path / "out"))
        comparing.check(launcher, Case("one", {}, known, strategy), run, SFT(), model, rows)

    return hold


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_right_training_has_no_difference(held: Any, strategy: str) -> None:
    held(1.0, strategy=strategy)


def test_a_difference_that_nobody_knows_is_told(held: Any) -> None:
    with pytest.raises(AssertionError, match=r"logs\[grad_norm\] \(step 0\)"):
        held(1.1)


def test_one_that_is_known_is_not(held: Any) -> None:
    held(1.1, (TRAINED,), strategy="ddp")


def test_one_that_is_known_and_is_not_there_is_told(held: Any) -> None:
    with pytest.raises(AssertionError, match="what is known no longer differs: .*gradients"):
        held(1.0, (TRAINED,))


def test_a_row_that_should_be_another_is_told(held: Any) -> None:
    model = tiny.qwen2()
    rows = comparing.conversation_rows(model.tokenizer, history=False)
    with pytest.raises(AssertionError, match=r"data\[labels\]"):
        held(1.0, rows=rows)


def test_conversations_become_what_is_written_here() -> None:
    """``w3 w2``, ``w4`` and so on, each followed by the end of sequence (1); the ids of words begin at 3."""
    words = tiny.qwen2().tokenizer
    first, second = comparing.conversation_rows(words)[:2]
    assert [*first["input_ids"]] == [6, 5, 1, 7, 1]
    assert [*first["labels"]] == [-100, -100, -100, 7, 1]
    assert [*second["input_ids"]] == [8, 5, 12, 1, 9, 10, 1, 9, 5, 12, 1, 10, 11, 1]
    assert [*second["labels"]] == [*[-100] * 4, 9, 10, 1, *[-100] * 4, 10, 11, 1]
    last = comparing.conversation_rows(words, history=False)[1]
    assert [*last["labels"]] == [*[-100] * 11, 10, 11, 1]


def test_pairs_become_what_is_written_here() -> None:
    pair = comparing.pair_rows(tiny.qwen2().tokenizer)[1]
    assert [*pair["chosen"]] == [7, 5, 12, 1, 7, 9, 9, 1]
    assert [*pair["chosen_mask"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [*pair["rejected"]] == [7, 5, 12, 1, 10, 13, 11, 11, 1]
    assert [*pair["rejected_mask"]] == [0, 0, 0, 0, 1, 1, 1, 1, 1]
