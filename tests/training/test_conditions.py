"""Three answers, how several make one, and conditions on a training."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_trlcompat.training.answers import Answer, Bite, all_of, any_of, negated
from pytest_trlcompat.training.conditions import ConditionError, check, evaluate, same
from pytest_trlcompat.training.training import Training

YES, OPEN, NO = Answer(Bite.BITES), Answer(Bite.CANNOT_TELL), Answer(Bite.DOES_NOT)
ANSWERS = st.sampled_from([YES, OPEN, NO])


@pytest.mark.parametrize(
    ("left", "right", "both", "either"),
    [
        (YES, YES, YES, YES),
        (YES, OPEN, OPEN, YES),
        (YES, NO, NO, YES),
        (OPEN, OPEN, OPEN, OPEN),
        (OPEN, NO, NO, OPEN),
        (NO, NO, NO, NO),
    ],
)
def test_two_answers_make_one(left: Answer, right: Answer, both: Answer, either: Answer) -> None:
    for pair in ([left, right], [right, left]):
        assert (all_of(pair).bite, any_of(pair).bite) == (both.bite, either.bite)


def test_of_nothing_all_hold_and_none_does() -> None:
    assert (all_of([]).bite, any_of([]).bite) == (Bite.BITES, Bite.DOES_NOT)


@given(st.lists(ANSWERS))
def test_not_all_is_one_that_is_not(answers: list[Answer]) -> None:
    assert negated(all_of(answers)).bite is any_of(map(negated, answers)).bite


@given(st.lists(ANSWERS, max_size=5))
def test_an_open_answer_is_what_it_may_become(answers: list[Answer]) -> None:
    """Whatever the open ones turn out to be, a decided answer stays; an open one may become either."""
    becoming = [[YES, NO] if answer is OPEN else [answer] for answer in answers]
    for make in (all_of, any_of):
        outcomes = {make(choice).bite for choice in itertools.product(*becoming)}
        now = make(answers).bite
        assert outcomes == ({now} if now is not Bite.CANNOT_TELL else {Bite.BITES, Bite.DOES_NOT})


def test_what_decides_is_said_and_what_is_open_is_not_repeated() -> None:
    answers = [Answer(Bite.CANNOT_TELL, look=("a",)), Answer(Bite.DOES_NOT, ("b=1",)), Answer(Bite.DOES_NOT, ("b=1",))]
    assert all_of(answers) == Answer(Bite.DOES_NOT, ("b=1",))
    assert any_of(answers) == Answer(Bite.CANNOT_TELL, (), ("a",))


@pytest.mark.parametrize(
    ("value", "expected", "is_same"),
    [
        (1, 1.0, True),
        (True, 1, False),
        (0, False, False),
        ("BFloat16", "bfloat16", True),
        (["sigmoid"], "sigmoid", True),
        (["sigmoid", "sft"], "sigmoid", False),
        (["sigmoid", "sft"], ["sigmoid", "sft"], True),
        (None, False, False),
    ],
)
def test_same(value: Any, expected: Any, is_same: bool) -> None:
    assert same(value, expected) is is_same


TRAINING = Training(
    "dpo",
    {
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "loss_type": ["sigmoid", "sft"],
        "adapter.type": "lora",
        "engine.deepspeed": {"zero_optimization": {}},
    },
    whole=True,
)


@pytest.mark.parametrize(
    ("condition", "bite"),
    [
        ({}, Bite.BITES),
        ({"gradient_checkpointing": True}, Bite.BITES),
        ({"activation_checkpointing": True}, Bite.BITES),
        ({"gradient_accumulation_steps": {"above": 1}}, Bite.BITES),
        ({"gradient_accumulation_steps": {"at_least": 5}}, Bite.DOES_NOT),
        ({"gradient_accumulation_steps": {"not": [1, 4]}}, Bite.DOES_NOT),
        ({"loss_type": {"has": "sft"}}, Bite.BITES),
        ({"loss_type": [["sigmoid", "sft"]]}, Bite.BITES),
        ({"adapter.type": {"given": True}}, Bite.BITES),
        ({"adapter.type": {"given": False}}, Bite.DOES_NOT),
        ({"adapter.type": ["lora", "vera"], "model.tied": True}, Bite.CANNOT_TELL),
        ({"adapter.type": "vera", "model.tied": True}, Bite.DOES_NOT),
        ([{"adapter.type": "vera"}, {"model.tied": True}], Bite.CANNOT_TELL),
        ([{"adapter.type": "vera"}, {"gradient_checkpointing": True}], Bite.BITES),
        ({"beta": 0.1}, Bite.CANNOT_TELL),
        ({"gradient_accumulation_steps": {"like": 4}}, Bite.BITES),
        ({"gradient_accumulation_steps": {"like": 2}}, Bite.CANNOT_TELL),
        ({"gradient_accumulation_steps": {"like": 1}}, Bite.DOES_NOT),
        ({"gradient_checkpointing": {"like": 2}}, Bite.DOES_NOT),
        ({"engine.deepspeed": {"has": "zero_optimization"}}, Bite.BITES),
    ],
)
def test_conditions_on_a_training(condition: Any, bite: Bite) -> None:
    check(condition)
    assert evaluate(condition, TRAINING).bite is bite


def test_a_default_counts_where_it_is_known() -> None:
    answer = evaluate({"beta": 0.1}, TRAINING, lambda name: {"beta": 0.1}[name])
    assert answer == Answer(Bite.BITES, ("beta=0.1 by default",))
    part = Training("dpo", {"loss_type": "sigmoid"})  # not all of its arguments are known
    assert evaluate({"beta": 0.1}, part, lambda name: 0.1).bite is Bite.CANNOT_TELL


def test_what_to_look_at() -> None:
    answer = evaluate({"model.tied": True, "beta": {"above": 0}}, Training("dpo"))
    assert answer.look == ("tie_word_embeddings in the model's config.json (yes)", "the config's beta (above 0)")


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ({"adapter.kidn": 1}, "'adapter.kidn' is no axis of a training"),
        ({"no_such_argument": 1}, "'no_such_argument' is no axis of a training"),
        (
            {"beta": {"over": 1}},
            "beta: one of not, at_least, at_most, above, below, given, like, has was expected",
        ),
        ({"beta": []}, "beta: an empty list of values never holds"),
        ([], "a list of conditions without one never holds"),
        ("beta", "a condition is a table of axes or a list of such tables, not 'beta'"),
        ([1], "a condition is a table of axes and values, not 1"),
    ],
)
def test_conditions_that_mean_nothing(condition: Any, text: str) -> None:
    with pytest.raises(ConditionError) as error:
        check(condition)
    assert str(error.value).startswith(text)
