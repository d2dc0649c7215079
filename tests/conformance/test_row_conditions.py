"""Rows of the conformance suites as conditions on a training: every axis has its place, every value means something."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat.conformance import rows
from pytest_trlcompat.conformance.row_conditions import INSTRUMENTS, conditions_of, is_placed
from pytest_trlcompat.training.conditions import check

ALL = [
    (axis, value)
    for trainer in rows.TRAINERS
    for row in rows.load(trainer).values()
    for axis, value in row.setting.items()
]


def test_every_axis_of_a_row_is_placed() -> None:
    assert sorted({axis for axis, _ in ALL if not is_placed(axis)}) == []


def test_every_value_of_a_row_is_a_condition() -> None:
    for axis, value in ALL:
        condition = conditions_of(axis, value)
        check(condition)
        assert condition


def test_every_instrument_is_an_axis_of_some_row() -> None:
    assert sorted(INSTRUMENTS - {axis for axis, _ in ALL}) == []


@pytest.mark.parametrize(
    ("axis", "value", "condition"),
    [
        ("gradient_accumulation_steps", 2, {"gradient_accumulation_steps": {"above": 1}}),
        ("gradient_accumulation_steps", 1, {"gradient_accumulation_steps": {"like": 1}}),
        ("beta", 0.1, {"beta": {"like": 0.1}}),
        ("loss_type", ["sigmoid", "sft"], {"loss_type": [["sigmoid", "sft"]]}),
        ("loss_type", "ipo", {"loss_type": "ipo"}),
        (
            "gradient_checkpointing_kwargs",
            {"use_reentrant": False},
            {"gradient_checkpointing_kwargs": [{"use_reentrant": False}]},
        ),
        ("model", "modernbert", {"model.family": ["modernbert", "modernbert-decoder"]}),
        ("adapter", "saved_head", {"adapter.saves_head": True}),
        ("images", "mixed", {"data.images": "mixed", "model.vision": True}),
        ("max_length", 12, {"data.form": "rows longer than the config's lengths"}),
        ("resumed", "between_steps", {"life.resumed": True}),
        ("seeds", "twice", {"life.kind": "seeds twice"}),
    ],
)
def test_what_a_value_asks_of_a_training(axis: str, value: Any, condition: dict[str, Any]) -> None:
    assert conditions_of(axis, value) == condition


def test_an_axis_that_there_is_not() -> None:
    with pytest.raises(KeyError, match="colour"):
        conditions_of("colour", "red")
