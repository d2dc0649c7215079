"""The end of a run says which known issues bite the trainings of its tests, each once."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from pytest_trlcompat.launch.beginnings import NAME, Beginnings
from pytest_trlcompat.plugin.trainings import PROPERTY
from pytest_trlcompat.training import begin

from .running import Run

TEST = """
import sys

class Trainer:
    def __init__(self):
        self.callback_handler = sys.modules["transformers.trainer_callback"].CallbackHandler()

    def is_world_process_zero(self):
        return True

    def train(self):
        return self.callback_handler.on_train_begin("args", "state", "control")

def test_one():
    assert Trainer().train() == ("args", "state", "control")

def test_two(caplog):
    Trainer().train()
    assert caplog.records == []

def test_three():
    pass
"""


class CallbackHandler:
    def on_train_begin(self, args: Any, state: Any, control: Any) -> Any:
        return args, state, control


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers as far as the plugin looks, imported already, and a doctor that knows two issues."""
    module = types.ModuleType("transformers.trainer_callback")
    monkeypatch.setattr(module, "CallbackHandler", CallbackHandler, raising=False)
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", module)
    monkeypatch.setitem(sys.modules, "transformers.trainer", types.ModuleType("transformers.trainer"))
    issues = (
        begin.BitingIssue("b", "weights", "known issue b (weights) bites this training: wrong"),
        begin.BitingIssue("a", "cost", "known issue a (cost) bites this training: slow"),
    )
    monkeypatch.setattr(begin, "biting", lambda trainer: issues)


def test_each_issue_is_said_once_and_nothing_is_logged(run: Run, pytester: pytest.Pytester, transformers: None) -> None:
    before = CallbackHandler.on_train_begin
    pytester.makepyfile(TEST)
    result = run()
    result.assert_outcomes(passed=3)
    lines = [line for line in result.outlines if "bites this training" in line]
    assert lines == [
        "trlcompat: known issue a (cost) bites this training: slow",
        "trlcompat: known issue b (weights) bites this training: wrong",
    ]
    assert CallbackHandler.on_train_begin is before, "upstream is as it was after each test"


def test_it_rides_on_the_reports_of_the_tests_that_train(
    run: Run, pytester: pytest.Pytester, transformers: None
) -> None:
    pytester.makepyfile(TEST)
    reports = [
        (report.nodeid.partition("::")[2], [name for name, _ in report.user_properties])
        for report in pytester.inline_run("-p", "pytest_trlcompat.plugin").getreports("pytest_runtest_logreport")
        if report.when == "call"
    ]
    assert reports == [("test_one", [PROPERTY]), ("test_two", [PROPERTY]), ("test_three", [])]


def test_a_run_without_trainings_says_nothing(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = run()
    result.assert_outcomes(passed=1)
    assert "bites" not in result.stdout.str()


def test_what_a_rank_hands_back(transformers: None) -> None:
    trainings = Beginnings()
    with trainings.watching():
        pass
    assert trainings.records() == []
    trainings.issues["a"] = "known issue a"
    (record,) = trainings.records()
    assert (record[NAME], record["name"], record["msg"]) == ("a", begin.LOGGER, "known issue a")
