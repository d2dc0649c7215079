"""What DPO's adapter reads of a trainer's batches, and what a dataset must become, by ids written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_trlcompat import tiny
from pytest_trlcompat.conformance.dpo import pairs
from pytest_trlcompat.conformance.dpo.adapter import ADAPTER, cut
from pytest_trlcompat.reference import PreferenceUndecided

MODEL = tiny.qwen2()
EOS, UNK = 1, 2
FIRST, SECOND = 3, 4  # w0, w1

PAIR = {
    "chosen": (7.0, 8.0, 9.0, 1.0),
    "chosen_mask": (0.0, 0.0, 1.0, 1.0),
    "rejected": (7.0, 8.0, 1.0),
    "rejected_mask": (0.0, 0.0, 1.0),
}


def test_batches_of_each_release_are_the_same_rows() -> None:
    halves = {
        "input_ids": torch.tensor([[7, 8, 9, 1], [7, 8, 1, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "completion_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]),
    }
    parts = {
        "prompt_input_ids": torch.tensor([[0, 7, 8]]),
        "prompt_attention_mask": torch.tensor([[0, 1, 1]]),
        "chosen_input_ids": torch.tensor([[9, 1]]),
        "chosen_attention_mask": torch.tensor([[1, 1]]),
        "rejected_input_ids": torch.tensor([[1, 0]]),
        "rejected_attention_mask": torch.tensor([[1, 0]]),
    }
    labels = {
        "chosen_input_ids": torch.tensor([[7, 8, 9, 1]]),
        "chosen_attention_mask": torch.tensor([[1, 1, 1, 1]]),
        "chosen_labels": torch.tensor([[-100, -100, 9, 1]]),
        "rejected_input_ids": torch.tensor([[7, 8, 1, 0]]),
        "rejected_attention_mask": torch.tensor([[1, 1, 1, 0]]),
        "rejected_labels": torch.tensor([[-100, -100, 1, -100]]),
    }
    assert [ADAPTER.read(each, {}).rows for each in (halves, parts, labels)] == [[PAIR]] * 3


@pytest.mark.parametrize("name", ["ref_chosen_logps", "reference_chosen_logps"])
def test_log_probabilities_that_were_computed_before_are_read(name: str) -> None:
    batch = {
        "input_ids": torch.tensor([[7, 1], [7, 1]]),
        "attention_mask": torch.ones(2, 2, dtype=torch.int64),
        "completion_mask": torch.tensor([[0, 1], [0, 1]]),
        name: torch.tensor([-2.5]),
    }
    assert ADAPTER.read(batch, {}).values == {"logps[reference_chosen]": [-2.5]}


def test_where_a_sequence_was_cut_follows_from_what_the_model_saw() -> None:
    assert cut(PAIR, "chosen", [7, 8, 9]) == {"chosen": (7, 8, 9), "chosen_mask": (0, 0, 1)}
    assert cut(PAIR, "chosen", [8, 9]) == {"chosen": (8, 9), "chosen_mask": (0, 1)}
    assert cut(PAIR, "chosen", [8, 9, 1]) == {"chosen": (8, 9, 1), "chosen_mask": (0, 1, 1)}


def sequences(row: dict[str, Any], undecided: PreferenceUndecided | None = None, **setting: Any) -> list[list[int]]:
    return [*pairs.sequences(pairs.tokenizer(MODEL, setting), row, undecided or PreferenceUndecided())]


def test_a_text_begins_and_ends_with_special_tokens() -> None:
    row = {"prompt": "w0", "chosen": " w1", "rejected": " w0 <eos>"}
    assert sequences(row) == [[FIRST], [SECOND, EOS], [FIRST, EOS]]
    assert sequences(row, tokenizer="bos")[0] == [UNK, FIRST]
    undecided = PreferenceUndecided(text_end="always", text_start=False)
    assert sequences(row, undecided, tokenizer="bos") == [[FIRST], [SECOND, EOS], [FIRST, EOS, EOS]]


def test_a_conversation_has_the_special_tokens_of_its_template() -> None:
    asked, answer, other = ({"role": "user", "content": "w0"}, *_answers())
    row = {"prompt": [asked], "chosen": [answer], "rejected": [other]}
    expected = [[FIRST, EOS], [SECOND, EOS], [FIRST, EOS]]
    assert sequences(row) == expected
    assert sequences(row, PreferenceUndecided(text_end="always")) == expected
    assert sequences({"chosen": [asked, answer], "rejected": [asked, other]}) == expected
    assert sequences(row, tokenizer="bos", template="bos")[0] == [UNK, FIRST, EOS]
    asking = 3 + 59  # w59, which the template writes before an answer
    vocabulary = tiny.qwen2(vocab_size=128)
    words = pairs.tokenizer(vocabulary, {"template": "generation"})
    found = pairs.sequences(words, row, PreferenceUndecided())
    assert [*found] == [[FIRST, EOS, asking], [SECOND, EOS], [FIRST, EOS]]


def _answers() -> list[dict[str, str]]:
    return [{"role": "assistant", "content": each} for each in ("w1", "w0")]


def test_rows_are_cut_as_the_config_says() -> None:
    arguments = {"max_length": 6, "truncation_mode": "keep_end"}
    rows = ADAPTER.expected_rows(MODEL, {"pairs": 3}, arguments, 0, "training")
    assert len(rows) == 3
    assert all(len(row["chosen"]) <= 6 and row["chosen"][-1] == EOS for row in rows)
    assert any(len(row["chosen"]) == 6 for row in rows)


def test_a_list_of_losses_is_known_where_they_have_weights() -> None:
    import trl

    has_weights = hasattr(trl.DPOConfig(output_dir="unused", bf16=False), "loss_weights")
    assert ADAPTER.is_known(trl, "loss_type", ["sigmoid", "hinge"]) is has_weights
    assert not ADAPTER.is_known(trl, "loss_type", ["sigmoid", "nothing"])
    assert ADAPTER.is_known(trl, "loss_type", "hinge")
    assert not ADAPTER.is_known(trl, "loss_type", "nothing")
