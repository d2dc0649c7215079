"""A training as data: axes, JSON both ways, several sources."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_trlcompat.conformance import rows
from pytest_trlcompat.strategies import NAMES
from pytest_trlcompat.trainers.curing import kinds
from pytest_trlcompat.training import axes
from pytest_trlcompat.training.aliases import RENAMED
from pytest_trlcompat.training.argument_names import ARGUMENTS
from pytest_trlcompat.training.errors import TrainingError
from pytest_trlcompat.training.training import DEFAULT, UNKNOWN, Training, joined

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMED = st.sampled_from([*axes.AXES, *(f"arguments.{name}" for name in ARGUMENTS)])
TRAININGS = st.builds(
    Training,
    st.sampled_from(["", *axes.TRAINERS]),
    st.dictionaries(NAMED, JSON, max_size=8),
    st.booleans(),
    st.text(),
    st.lists(st.text(), max_size=2).map(tuple),
)


@given(TRAININGS)
def test_json_both_ways(training: Training) -> None:
    text = training.to_json()
    assert Training.from_json(text) == training
    assert Training.from_json(text).to_json() == text


def test_the_schema() -> None:
    training = Training("grpo", {"beta": 0.1, "parallel.strategy": "zero3"}, source="a.yaml", notes=("n",))
    assert training.to_dict() == {
        "schema": 1,
        "trainer": "grpo",
        "source": "a.yaml",
        "whole": False,
        "notes": ["n"],
        "arguments": {"beta": 0.1},
        "parallel": {"strategy": "zero3"},
        **{part: {} for part in ("model", "adapter", "optimizer", "data", "engine", "life")},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a training as JSON was expected"),
        ("[]", "a training of schema 1 was expected, schema None was found"),
        ('{"schema": 9}', "a training of schema 1 was expected, schema 9 was found"),
        ('{"schema": 1, "optimiser": {}}', "a training has no optimiser; it has adapter, arguments,"),
        ('{"schema": 1, "model": 3}', "model of a training must be an object of names and values"),
        ('{"schema": 1, "model": {"colour": 3}}', "model.colour: no axis of a training; the axes are"),
        ('{"schema": 1, "trainer": "dop"}', "trainer 'dop' is not known; known are grpo, ppo"),
    ],
)
def test_what_is_no_training(text: str, message: str) -> None:
    with pytest.raises(TrainingError) as error:
        Training.from_json(text)
    assert str(error.value).startswith(message)


def test_values_that_are_there_by_default_or_unknown() -> None:
    (older,) = RENAMED["eval_strategy"]
    whole, part = Training(values={older: "steps"}, whole=True), Training()
    assert whole.arguments == {"eval_strategy": "steps"}
    assert whole.value(older) == whole.value("arguments.eval_strategy") == "steps"
    assert whole.value("beta") is DEFAULT
    assert part.value("beta") is UNKNOWN
    assert whole.value("model.tied") is UNKNOWN


def test_the_last_source_counts() -> None:
    first = Training("sft", {"beta": 0.1, "loss_type": "nll"}, whole=True, source="a", notes=("n",))
    both = joined([first, Training("", {"beta": 0.2}, source="b", notes=("n", "m"))])
    assert both == Training("sft", {"beta": 0.2, "loss_type": "nll"}, True, "a, b", ("n", "m"))


def test_the_trainers_that_the_doctor_knows_are_trainings() -> None:
    assert {**kinds.TRAINERS, "trainer": axes.TRAINERS["trainer"]} == axes.TRAINERS


def test_fields_of_rows_are_arguments() -> None:
    """A row's own axes are those that no config has."""
    placed = {name for trainer in rows.TRAINERS for row in rows.load(trainer).values() for name in row.setting}
    assert {"beta", "loss_type", "gradient_accumulation_steps"} <= placed & set(ARGUMENTS)


def test_every_strategy_is_a_value_that_readers_give() -> None:
    assert set(NAMES) == {"single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"}


def test_documents_are_plain_json() -> None:
    assert json.loads(Training("dpo", {"beta": 0.1}).to_json())["arguments"] == {"beta": 0.1}
