"""What KTO's adapter reads of a trainer's batches, and what a dataset must become, by ids written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_trlcompat import tiny
from pytest_trlcompat.conformance.kto import adapter, unpaired
from pytest_trlcompat.conformance.kto.adapter import ADAPTER
from pytest_trlcompat.conformance.supervised.records import MicroBatchRecord, Recording
from pytest_trlcompat.reference import KTOSettings, KTOUndecided

MODEL = tiny.qwen2()
EOS, UNK = 1, 2
FIRST, SECOND, THIRD = 3, 4, 5  # w0, w1, w2
MARKED = {
    "input_ids": torch.tensor([[7, 8, 9, 1], [5, 6, 1, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
    "completion_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]),
    "KL_input_ids": torch.tensor([[7, 8, 6, 1], [5, 9, 1, 0]]),
    "KL_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
    "KL_completion_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]),
    "label": torch.tensor([True, False]),
}
ROWS = [
    {
        "label": (1.0,),
        "ids": (7.0, 8.0, 9.0, 1.0),
        "mask": (0.0, 0.0, 1.0, 1.0),
        "kl_ids": (7.0, 8.0, 6.0, 1.0),
        "kl_mask": (0.0, 0.0, 1.0, 1.0),
    },
    {
        "label": (0.0,),
        "ids": (5.0, 6.0, 1.0),
        "mask": (0.0, 1.0, 1.0),
        "kl_ids": (5.0, 9.0, 1.0),
        "kl_mask": (0.0, 1.0, 1.0),
    },
]


def labelled() -> dict[str, Any]:
    """The same batch as earlier releases have it."""
    found: dict[str, Any] = {"label": [True, False]}
    for prefix in ("", "KL_"):
        ids, mask = MARKED[f"{prefix}input_ids"], MARKED[f"{prefix}completion_mask"]
        found[f"{prefix}completion_input_ids"] = ids
        found[f"{prefix}completion_attention_mask"] = MARKED[f"{prefix}attention_mask"]
        found[f"{prefix}completion_labels"] = ids.masked_fill(mask == 0, -100)
    return found


def renamed() -> dict[str, Any]:
    """The same as releases between have it."""
    found = dict(MARKED)
    for prefix in ("", "KL_"):
        for name in ("input_ids", "attention_mask"):
            found[f"{prefix}completion_{name}"] = found.pop(f"{prefix}{name}")
    return found


@pytest.mark.parametrize("batch", [MARKED, renamed(), labelled()], ids=["masks", "names", "labels"])
def test_batches_of_each_release_are_the_same_rows(batch: dict[str, Any]) -> None:
    read = ADAPTER.read(batch, {"max_length": 64})
    assert (read.rows, read.problems) == (ROWS, [])


def test_a_loss_without_a_reference_point_has_no_mismatched_completions() -> None:
    batch = {name: value for name, value in MARKED.items() if not name.startswith("KL_")}
    assert ADAPTER.read(batch, {}).rows == [{name: row[name] for name in ("label", "ids", "mask")} for row in ROWS]


def test_completions_of_another_batch_are_a_problem() -> None:
    ids = MARKED["KL_input_ids"].clone()
    ids[1, 1] = 11
    found = ADAPTER.read({**MARKED, "KL_input_ids": ids}, {"max_length": 64}).problems
    assert [stage for stage, _, _ in found] == ["data[kl_completions]"]
    # Where something may have been cut, it is not known what there was.
    assert ADAPTER.read({**MARKED, "KL_input_ids": ids}, {"max_length": 4}).problems == []


@pytest.mark.parametrize("name", ["ref", "reference"])
def test_log_probabilities_that_were_computed_before_are_read(name: str) -> None:
    computed = {f"{name}_logps": torch.tensor([-2.5, -1.5]), f"{name}_KL_logps": torch.tensor([-3.0, -4.0])}
    assert ADAPTER.read({**MARKED, **computed}, {"max_length": 64}).values == {
        "logps[reference_chosen]": [-2.5],
        "logps[reference_rejected]": [-1.5],
        "logps[reference_kl]": [-3.0, -4.0],
    }


def test_rows_that_a_dataset_must_become() -> None:
    words = unpaired.tokenizer(MODEL, {})
    given = [
        {"prompt": "w0", "completion": " w1", "label": True},
        {"prompt": "w1 w1", "completion": " w2 w2", "label": False},
        {"prompt": "w2", "completion": " w0 <eos>", "label": True},
    ]
    found = unpaired.expected_rows(words, given, KTOSettings(), 2, None)
    assert [[*row["ids"]] for row in found] == [
        [FIRST, SECOND, EOS],
        [SECOND, SECOND, THIRD, THIRD, EOS],
        [THIRD, FIRST, EOS],
    ]
    assert [[*row["label"]] for row in found] == [[1.0], [0.0], [1.0]]
    # Completions are exchanged among the rows of a micro-batch; the last one has a row alone.
    assert [[*row["kl_ids"]] for row in found] == [
        [FIRST, THIRD, THIRD, EOS],
        [SECOND, SECOND, SECOND, EOS],
        [THIRD, FIRST, EOS],
    ]
    assert [*found[1]["mask"]] == [0, 0, 1, 1, 1]
    cut = unpaired.expected_rows(words, given, KTOSettings(loss_type="apo_zero_unpaired"), 2, 3)
    assert cut[1] == {"label": (0.0,), "ids": (SECOND, SECOND, THIRD), "mask": (0, 0, 1)}


def test_a_row_of_whose_completion_nothing_is_left_is_none() -> None:
    given = [
        {"prompt": "w1 w1", "completion": " w2", "label": False},
        {"prompt": "w0", "completion": " w1", "label": True},
    ]
    cut = unpaired.expected_rows(unpaired.tokenizer(MODEL, {}), given, KTOSettings(), 2, 2)
    # The one that is left is exchanged with nothing.
    assert cut == [
        {
            "label": (1.0,),
            "ids": (FIRST, SECOND),
            "mask": (0.0, 1.0),
            "kl_ids": (FIRST, SECOND),
            "kl_mask": (0.0, 1.0),
        }
    ]


@pytest.mark.parametrize("left, is_seen", [(3, True), (4, False)])
def test_a_sequence_that_is_cut_by_more_than_is_too_much_is_seen(left: int, is_seen: bool) -> None:
    whole = [([7, 8], [9, 9, 9, 9, 1])]
    batch = MicroBatchRecord([{"ids": (7.0, 8.0, 9.0, 9.0)[:left]}])
    one = Recording(arguments={"max_length": 6}, micro_batches=[batch])
    found = [*adapter._overcut([one], whole)]
    assert [(each.stage, each.expected, each.found) for each in found] == [("data[kept]", [6], [left])] * is_seen


def test_a_template_may_write_behind_an_end() -> None:
    words = unpaired.tokenizer(MODEL, {"template": "behind_end"})
    behind = words.convert_tokens_to_ids("w58")
    row = {"prompt": [{"role": "user", "content": "w0"}], "completion": [{"role": "assistant", "content": "w1"}]}
    assert unpaired.sequence(words, row, KTOUndecided()) == ([FIRST, EOS, behind], [SECOND, EOS, behind])


def test_pairs_become_rows_with_labels() -> None:
    pairs: list[dict[str, Any]] = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": "d e", "rejected": "d f"},
    ]
    assert unpaired.unpaired(pairs) == [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "d", "completion": " e", "label": True},
        {"prompt": "a", "completion": "c", "label": False},
        {"prompt": "d", "completion": " f", "label": False},
    ]


def test_beginnings_and_ends() -> None:
    words = unpaired.tokenizer(MODEL, {"tokenizer": "bos"})
    row = {"prompt": "w0", "completion": " w1"}
    assert unpaired.sequence(words, row, KTOUndecided()) == ([UNK, FIRST], [SECOND, EOS])
    assert unpaired.sequence(words, row, KTOUndecided(text_start="missing")) == ([UNK, FIRST], [SECOND, EOS])
    assert unpaired.sequence(words, row, KTOUndecided(text_start="none")) == ([FIRST], [SECOND, EOS])
    asked = [{"role": "user", "content": "w0"}]
    talk = {"prompt": asked, "completion": [{"role": "assistant", "content": "w1"}]}
    assert unpaired.sequence(words, talk, KTOUndecided()) == ([FIRST, EOS], [SECOND, EOS])
    changed = KTOUndecided(text_start="missing")
    assert unpaired.sequence(words, talk, changed) == ([UNK, FIRST, EOS], [SECOND, EOS])
