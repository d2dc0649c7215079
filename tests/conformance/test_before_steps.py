"""What is compared of PPO and the legacy RLOO before a model has computed anything: arguments, how tokens are drawn."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat.conformance.on_policy.quantities import DRAWN, before_steps
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording

ARGUMENTS = {"response_length": 6, "temperature": 0.7, "stop_token": "eos", "run_name": "mine"}
RIGHT = {
    "do_sample": True,
    "max_new_tokens": 6,
    "repetition_penalty": None,
    "temperature": 0.7 + 1e-7,
    "top_k": 0,
    "top_p": None,
}


def recording(drawn: dict[str, Any] | None = None, **changed: Any) -> OnPolicyRecording:
    rows = [([5, 6], [7, 8, 1]), ([5, 7], [9, 9, 9, 9, 9, 9])]
    calls = [RIGHT, {**RIGHT, **(drawn or {})}, {**RIGHT, **(drawn or {})}]
    return OnPolicyRecording(**{"arguments": ARGUMENTS, "rows": rows, "drawn": calls, **changed})


def found(one: OnPolicyRecording) -> list[tuple[str, str]]:
    return [(each.stage, each.where) for each in before_steps(one)]


def test_a_generation_as_the_config_has_it_shows_nothing() -> None:
    assert set(RIGHT) == set(DRAWN)
    assert found(recording(asked={"run_name": "mine"}, collated=4)) == []


@pytest.mark.parametrize(
    "name, value", [("top_k", 7), ("top_p", 0.8), ("repetition_penalty", 1.3), ("temperature", 0.3), ("do_sample", 0)]
)
def test_what_draws_tokens_otherwise_is_found_once(name: str, value: float) -> None:
    assert found(recording({name: value})) == [(f"generation[{name}]", "call 1")]


def test_tokens_behind_the_stop_token_are_found() -> None:
    rows = [([5], [7, 1]), ([6], [1, 8, 9])]
    (difference,) = before_steps(recording(rows=rows))
    assert (difference.stage, difference.where) == ("generation[stop_token]", "row 1")
    assert (difference.expected, difference.found) == ([1], [1, 8, 9])
    assert found(recording(rows=rows, arguments={**ARGUMENTS, "stop_token": None})) == []
    numbered = {**ARGUMENTS, "stop_token": None, "stop_token_id": 8}
    assert found(recording(rows=rows, arguments=numbered)) == [("generation[stop_token]", "row 1")]


def test_what_the_user_gave_must_be_taken() -> None:
    one = recording(asked={"run_name": "other"}, collated=0)
    assert found(one) == [("config[run_name]", "built"), ("data_collator", "training")]
