"""What distillation's adapter reads of batches, and what it says of prompts and samples, by ids written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pytest_trlcompat import tiny
from pytest_trlcompat.conformance.architectures import ARCHITECTURES
from pytest_trlcompat.conformance.distillation import models, prompts, sampled
from pytest_trlcompat.conformance.distillation.adapter import ADAPTER
from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.grpo.records import Generated
from pytest_trlcompat.conformance.grpo.records import Recording as Sampled
from pytest_trlcompat.conformance.supervised.records import MicroBatchRecord, Recording

MODEL = tiny.qwen2()
EOS, UNK = 1, 2
BATCH = {
    "prompt_ids": torch.tensor([[0, 7, 8], [5, 6, 9]]),
    "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
    "completion_ids": torch.tensor([[4, 3, 1], [1, 0, 0]]),
    "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
}
ROWS: list[dict[str, tuple[float, ...]]] = [
    {"ids": (7.0, 8.0, 4.0, 3.0, 1.0), "mask": (0.0, 0.0, 1.0, 1.0, 1.0)},
    {"ids": (5.0, 6.0, 9.0, 1.0), "mask": (0.0, 0.0, 0.0, 1.0)},
]
ARGUMENTS = {
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 2,
    "max_completion_length": 3,
    "shuffle_dataset": False,
    "temperature": 1.0,
}
DRAWN = {"do_sample": True, "max_new_tokens": 3, "temperature": 1.0, "eos_token_id": [EOS]}
DRAWN |= {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


def test_a_batch_is_read_without_its_padding() -> None:
    assert ADAPTER.read(BATCH, {}).rows == ROWS
    with_tools = ADAPTER.read({**BATCH, "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, {}).rows
    assert with_tools[0] == {"ids": ROWS[0]["ids"], "mask": (0.0, 0.0, 1.0, 0.0, 1.0)}


def test_a_completion_follows_from_its_prompt_alone() -> None:
    data = prompts.of_setting(MODEL, {}, 0, 5)
    asked = [[3 + first, 4, 5] for first in range(40)]
    answers = [data.completion(prompt, 0, 0) for prompt in asked]
    assert [data.completion(prompt, 3, 7) for prompt in asked] == answers
    assert {len(each) for each in answers} == {1, 2, 3, 4, 5}
    assert any(each == [EOS] for each in answers)
    assert any(EOS not in each for each in answers)
    assert all(EOS not in each[:-1] for each in answers)
    assert max(len(data.completion(prompt, 0, 0)) for prompt in asked) == 5
    shorter = prompts.of_setting(MODEL, {}, 0, 3)
    assert max(len(shorter.completion(prompt, 0, 0)) for prompt in asked) == 3


@pytest.mark.parametrize(
    "setting, begins, ends",
    [
        ({}, [], []),
        ({"tokenizer": "bos"}, [UNK], []),
        ({"data": "conversational"}, [], [EOS]),
        ({"tokenizer": "thinking_template", "chat_template_kwargs": {"thinking": True}}, [], [EOS, 62, 61, 61]),
        ({"tokenizer": "thinking_template", "chat_template_kwargs": {"thinking": False}}, [], [EOS, 62]),
    ],
)
def test_rows_that_prompts_must_become(setting: dict[str, Any], begins: list[int], ends: list[int]) -> None:
    data = prompts.of_setting(MODEL, setting, 0, 5)
    rows = prompts.expected_rows(MODEL, setting, data, "training")
    assert len(rows) == 32
    for text, row in zip(data.texts(32, "training"), rows, strict=True):
        own = [*begins, *(3 + int(word[1:]) for word in text.split())]
        ids, mask = [int(each) for each in row["ids"]], [int(each) for each in row["mask"]]
        asked = ids[: mask.index(1)]
        template = asked[len(own) :]
        assert asked[: len(own)] == own
        assert template[: len(ends)] == ends if ends else template == []
        assert ids[len(asked) :] == data.completion(asked, 0, 0)
        assert mask == [0] * len(asked) + [1] * (len(ids) - len(asked))


def test_a_conversation_that_an_assistant_ends_is_continued() -> None:
    setting = {"data": "assistant_last"}
    rows = prompts.expected_rows(MODEL, setting, prompts.of_setting(MODEL, setting, 0, 5), "training")
    begun = [63, 63, 63]  # w60 three times, and no end of the message
    for row in rows:
        asked = [int(each) for each in row["ids"][: row["mask"].index(1.0)]]
        assert asked[-3:] == begun


def recording(asked: Sequence[Sequence[int]], **changed: Any) -> Recording:
    """A training of one step, for which these prompts were sampled."""
    answers = [[4, 3, 1], [1]]
    generated = [Generated([*map(list, asked)], answers, {**DRAWN, **changed.pop("drawn", {})})]
    found = Recording(arguments={**ARGUMENTS, **changed.pop("arguments", {})})
    found.micro_batches = [MicroBatchRecord([*ROWS])]
    found.extras = {"sampled": Sampled({}, generated=generated, tables=changed.pop("tables", []))}
    found.extras |= changed
    return found


def stages(found: Recording) -> list[str]:
    return [each.stage for each in sampled.differences([found], ROWS, MODEL.tokenizer, (EOS,))]


IN_ORDER = [[7, 8], [5, 6, 9]]


def test_what_is_as_documented_does_not_differ() -> None:
    assert stages(recording(IN_ORDER)) == []
    assert stages(recording(IN_ORDER[::-1], arguments={"shuffle_dataset": True})) == []


def test_the_order_of_prompts() -> None:
    assert stages(recording(IN_ORDER[::-1])) == ["data[order]"]
    assert stages(recording(IN_ORDER, arguments={"shuffle_dataset": True})) == ["data[order]"]


def test_how_tokens_would_be_drawn() -> None:
    assert stages(recording(IN_ORDER, drawn={"temperature": 0.5})) == ["generation[temperature]"]
    assert stages(recording(IN_ORDER, drawn={"eos_token_id": 5})) == ["generation[eos_token_id]"]


def test_the_student_samples_once_for_a_step() -> None:
    assert stages(recording(IN_ORDER, arguments={"gradient_accumulation_steps": 2})) == ["generation[prompts]"]
    assert stages(recording(IN_ORDER, others=1)) == ["generation[model]"]


def test_the_teachers_precision() -> None:
    assert stages(recording(IN_ORDER, teacher="torch.float32")) == []
    assert stages(recording(IN_ORDER, teacher="torch.bfloat16")) == ["teacher[dtype]"]


def test_tables_show_each_completion_beside_its_prompt() -> None:
    asked = {"log_completions": True}
    first, second = ("w4 w5", "w1 w0"), ("w2 w3 w6", "")
    right: tuple[list[str], list[str], dict[str, Any]] = (["w4 w5", "w2 w3 w6"], ["w1 w0", ""], {})

    def with_tables(*tables: Any) -> list[str]:
        found = recording(IN_ORDER, arguments=asked, tables=[*tables])
        found.logs = [{"loss": 0.0}]
        return stages(found)

    assert with_tables(right) == []
    assert with_tables(right, right) == []
    assert with_tables() == ["table"]
    assert with_tables(([first[0], second[0]], [second[1], first[1]], {})) == ["table"]
    assert with_tables((right[0], right[1][:1], {})) == ["table"]
    assert with_tables(right, ([first[0]], [first[1]], {})) == ["table"]


@pytest.mark.versions(trl=">=1.10", reason="DistillationTrainer, and models of its day")
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_models_of_other_architectures_are_the_same_each_time(name: str) -> None:
    one, other = (objects.policy(MODEL, {"model": name}) for _ in range(2))
    assert one.config.vocab_size == MODEL.vocab_size
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        logits = [each(input_ids=ids).logits for each in (one, other)]
    assert torch.equal(*logits)
    assert float(logits[0].std()) > 0.05


@pytest.mark.versions(trl=">=1.10", reason="DistillationTrainer, and models of its day")
def test_a_teacher_has_other_weights_and_sizes_and_the_same_vocabulary() -> None:
    student, teacher = models.untrained(MODEL, {"teacher": "experts"})
    assert (student.training, teacher.training) == (False, False)
    own = models.teacher_of(MODEL)
    assert (own.hidden_size, own.vocab_size) == (MODEL.hidden_size // 2, MODEL.vocab_size)
    assert own.seed != MODEL.seed
    (refused,) = [models.untrained(MODEL, {"teacher": "other_vocabulary"})[1]]
    assert refused.config.vocab_size != MODEL.vocab_size
    _, rounded = models.untrained(MODEL, {"teacher": "name", "teacher_model_init_kwargs": {"dtype": "bfloat16"}})
    assert next(rounded.parameters()).dtype is torch.bfloat16
