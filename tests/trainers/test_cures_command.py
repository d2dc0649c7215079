"""``trlcompat cures`` where there is no stack: what it says, and that its parts need none."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pytest_trlcompat.cli import main
from pytest_trlcompat.trainers.curing import command
from pytest_trlcompat.trainers.curing.command import UnknownTrainerError, trainer_named
from pytest_trlcompat.trainers.curing.conditions import Condition, defined_by, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure, CureStatus, status_of


@pytest.mark.parametrize("name", ["grpo", "ppo", "trainer", "trl:DPOTrainer"])
def test_without_the_stack_it_says_where_to_run_it(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("trl", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    assert main(["cures", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    missing = "trl" if name in ("grpo", "trl:DPOTrainer") else "transformers"
    assert err == (
        f"trlcompat cures: {missing} is not installed in {sys.prefix}; run this with the Python of your training "
        "environment: python -m pytest_trlcompat cures\n"
    )


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(UnknownTrainerError) as caught:
        trainer_named("no_such_package_at_all:Trainer")
    assert str(caught.value).startswith("no_such_package_at_all is not installed in ")
    assert str(caught.value).endswith("the Python of your training environment: python -m pytest_trlcompat cures")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dpo",
            "unknown trainer 'dpo': give one of trainer, grpo, ppo, or package.module:Class, such as trl:DPOTrainer",
        ),
        ("trl:", "'trl:' is no package.module:Class, such as trl:DPOTrainer"),
        ("json:Nothing", "json has no Nothing"),
    ],
)
def test_names_that_are_no_trainers(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cures", name]) == 2
    assert capsys.readouterr().err == f"trlcompat cures: {message}\n"


def test_without_rich_a_cure_is_a_paragraph() -> None:
    status = CureStatus("AMixin", None, "where it matters", ("one",), ("https://github.com/huggingface/trl/pull/1",))
    lines = list(command._plain([status], 120))
    assert lines == ["AMixin: depends", "  where it matters", "  one", "  trl/pull/1"]


WARM = Condition("in summer", "it is winter", lambda trainer: bool(trainer["warm"]))
DRY = Condition("without rain", "it rains", lambda trainer: bool(trainer["dry"]))
LACKING = Condition("with it", "without it", lambda trainer: True, needs="peft")


@pytest.mark.parametrize(
    ("trainer", "answer"),
    [
        (None, Activity(None, "in summer, without rain: why")),
        ({"warm": 1, "dry": 1}, Activity(True, "why")),
        ({"warm": 0, "dry": 0}, Activity(False, "it is winter")),
        ({"warm": 1, "dry": 0}, Activity(False, "it rains")),
    ],
)
def test_conditions_decide_of_a_trainer_and_are_named_of_a_class(trainer: Any, answer: Activity) -> None:
    assert under(trainer, "why", WARM, DRY) == answer


def test_a_condition_whose_package_is_missing_holds_for_no_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_trlcompat.trainers.curing.conditions.find_spec", lambda name: None)
    assert under(None, "why", LACKING) == Activity(False, "PEFT is not installed")


def test_the_package_that_defines_a_method_is_found_beneath_cures() -> None:
    upstream = type("Trainer", (), {"__module__": "transformers.trainer", "log": None, "save": None})
    trl = type("TRLTrainer", (upstream,), {"__module__": "trl.trainer", "log": None})
    cure = type("AMixin", (trl,), {"__module__": "pytest_trlcompat.trainers.made_up", "log": None, "save": None})
    assert [defined_by(cure, name) for name in ("log", "save", "other")] == ["trl", "transformers", ""]


class LooksMixin(Cure):
    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return Activity(True, trainer.nothing)


def test_a_trainer_without_what_a_cure_looks_at_is_told_and_not_ended() -> None:
    status = status_of(LooksMixin, LooksMixin, object())
    assert (status.active, status.reason) == (None, "cannot be seen: 'object' object has no attribute 'nothing'")
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'nothing'"):
        status_of(LooksMixin, LooksMixin)
