"""Which exceptions are refusals of a setting: raised on purpose, by whose argument it is, before a training begins."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_trlcompat.conformance import refusals
from pytest_trlcompat.conformance.refusals import BEFORE, EVALUATION, TRAINING, result_without_numbers

SOURCE = """
def raised(value):
    raise ValueError(
        f"{value} is none of those that"
        " are known"
    )

def raised_again(value):
    try:
        return value.name
    except AttributeError as error:
        raise TypeError("value must have a name") from error

def asserted(value):
    assert value is None, "value must be None"

def asserted_without_a_word(value):
    assert value is None

def crashed(value):
    return value.name

def crashed_in_its_own_message(value):
    raise ValueError(f"{value.name} is unknown")

def passed_on(value):
    return __import__("json").loads(value)

def train(value):
    return raised(value)

def evaluate(value):
    return raised(value)

class Lazy:
    def __getattr__(self, name):
        raise AttributeError(f"no {name}")

def looked_up(value):
    return Lazy().name
"""


@pytest.fixture
def library(tmp_path: Path, request: pytest.FixtureRequest) -> ModuleType:
    """A module of ``trl``, or of the package that the test names."""
    path = tmp_path / getattr(request, "param", "trl") / "trainer.py"
    path.parent.mkdir()
    path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("refusing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_of(module: ModuleType, name: str, value: Any = 1) -> BaseException:
    try:
        getattr(module, name)(value)
    except Exception as error:
        return error
    raise AssertionError(f"{name} raises nothing")


@pytest.mark.parametrize("name", ["raised", "raised_again", "asserted"])
def test_what_a_library_says_itself_is_meant(name: str, library: ModuleType) -> None:
    assert refusals.is_meant(error_of(library, name))


@pytest.mark.parametrize(
    "name", ["asserted_without_a_word", "crashed", "crashed_in_its_own_message", "passed_on", "looked_up"]
)
def test_an_operation_that_fails_is_a_crash(name: str, library: ModuleType) -> None:
    assert not refusals.is_meant(error_of(library, name))


@pytest.mark.parametrize("library", ["torch"], indirect=True)
def test_a_library_that_knows_nothing_of_the_argument_refuses_nothing(library: ModuleType) -> None:
    assert not refusals.is_meant(error_of(library, "raised"))


def test_when_an_error_came_is_known_by_the_loop_that_it_came_through(library: ModuleType) -> None:
    phases = {name: refusals.phase(error_of(library, name)) for name in ("raised", "evaluate", "train")}
    assert phases == {"raised": BEFORE, "evaluate": EVALUATION, "train": TRAINING}


def ended(phase: str = BEFORE, meant: bool = True, text: str | None = "ValueError: bad beta") -> dict[str, Any]:
    return {} if text is None else {"text": text, "meant": meant, "phase": phase}


CASES: list[tuple[Mapping[str, Any], dict[str, Any], list[str]]] = [
    ({}, ended(), []),
    ({}, ended(text=None), ["refusal"]),
    ({}, ended(meant=False), ["refusal[raised]"]),
    ({}, ended(TRAINING), ["refusal[when]"]),
    ({}, ended(EVALUATION), ["refusal[when]"]),
    ({"refused_in": "training"}, ended(TRAINING), []),
    ({"refused_in": "training"}, ended(), []),
    ({"refused_in": "evaluation"}, ended(EVALUATION), []),
    ({"refused_in": "evaluation"}, ended(TRAINING), ["refusal[when]"]),
    ({"refused_naming": "beta"}, ended(), []),
    ({"refused_naming": "gamma"}, ended(), ["refusal[text]"]),
    ({"refused_naming": "beta"}, ended(TRAINING, meant=False), ["refusal[raised]"]),
]


@pytest.mark.parametrize("setting, training, stages", CASES)
def test_a_setting_that_must_be_refused_is_judged_by_its_error(
    setting: Mapping[str, Any], training: dict[str, Any], stages: list[str]
) -> None:
    found = result_without_numbers({"refused": True, **setting}, training)
    assert found is not None
    assert [each["stage"] for each in found["differences"]] == stages
    assert found["refused_with"] == training.get("text")


def test_what_may_be_refused_may_crash() -> None:
    assert result_without_numbers({"refused": "allowed"}, ended(TRAINING, meant=False)) == {
        "refused_with": "ValueError: bad beta"
    }
