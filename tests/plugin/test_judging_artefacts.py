"""The judge, where the software accelerator cannot do what a suite needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.accelerator.artefacts import Artefact, What
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.verdict import Verdict, read_records
from pytest_trlcompat.launch import Failure
from pytest_trlcompat.plugin.judging import Finding, Judge

from .judged import ISSUE, failed, nothing_skipped, raising

ARTEFACT = Artefact(What.OPERATOR, "aten::foo for npu", "it has no such kernel", "2.9.1")
LACKING = Failure("NotImplementedError", "Could not run", "tb", ("NotImplementedError", "Exception"), ARTEFACT)
SHOWING = Failure("RuntimeError", "Expected all tensors to be on the same device", "", ("RuntimeError",), ARTEFACT)


@pytest.mark.parametrize("subject", ["upstream", "corrected"])
def test_a_limit_of_the_accelerator_is_untestable_with_the_reason(judge: Judge, results: Path, subject: str) -> None:
    with pytest.raises(pytest.skip.Exception) as skipped:
        judge(lambda: raising(failed(LACKING)), subject=subject, strategy="fsdp1")
    predicted = "broken" if subject == "upstream" else "ok"
    text = f"{ISSUE}, {subject}, fsdp1 could not be tested; predicted is {predicted}. {ARTEFACT.describe()}"
    assert str(skipped.value) == text
    (record,) = read_records(results)
    assert (record.verdict, record.untested, record.reason) == (Verdict.UNTESTABLE, True, ARTEFACT.describe())
    assert (record.as_predicted, record.verdict.is_problem) == (True, False)
    assert record.evidence["exception"] == "NotImplementedError"
    assert judge.properties == [("trlcompat", record.to_json())]


def test_the_known_symptom_goes_before_it(judge: Judge, results: Path) -> None:
    with nothing_skipped():
        judge(lambda: raising(failed(SHOWING)), subject="upstream", strategy="fsdp1")
    assert read_records(results)[0].verdict is Verdict.BROKEN


def test_where_error_is_predicted_it_is_no_such_error(judge: Judge, results: Path) -> None:
    judge.issue = known_issues.load().get_issue("grpo-eval-metrics")
    with pytest.raises(pytest.skip.Exception):
        judge(lambda: raising(failed(LACKING)), subject="upstream", strategy="single")
    assert read_records(results)[0].verdict is Verdict.UNTESTABLE


@pytest.mark.parametrize(
    ("verdict", "recorded"),
    [
        (Verdict.ERROR, Verdict.UNTESTABLE),
        (Verdict.SILENT, Verdict.UNTESTABLE),
        (Verdict.WASTEFUL, Verdict.UNTESTABLE),
        (Verdict.BROKEN, Verdict.BROKEN),
        (Verdict.OK, Verdict.OK),
    ],
)
def test_a_suite_that_went_on_after_it_is_not_believed(
    judge: Judge, results: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict, recorded: Verdict
) -> None:
    monkeypatch.setattr(stack, "installed", dict)  # nothing is predicted
    kept = {"runs": [{"failure": f"RuntimeError: boom [{ARTEFACT.describe()}]"}], "reason": "a suite's own"}
    ends = pytest.raises(pytest.skip.Exception) if recorded is Verdict.UNTESTABLE else nothing_skipped()
    with ends:
        judge(lambda: Finding(verdict, kept), subject="upstream", strategy="fsdp1")
    (record,) = read_records(results)
    assert record.verdict is recorded
    assert record.evidence["runs"] == kept["runs"]
    assert (record.reason == ARTEFACT.describe()) is (recorded is Verdict.UNTESTABLE)


@dataclass
class Life:
    """Stands for what a suite keeps of a launch: ``_known`` are others that it has made."""

    failures: dict[str, str]
    _known: dict[str, str]


Life.__module__ = "suites.ppo.runs"


def test_an_assertion_that_fails_because_of_it_is_untestable(judge: Judge, results: Path) -> None:
    def measure() -> Finding:
        life = Life({"train": f"x [{ARTEFACT.describe()}]"}, {})
        assert not life.failures, "training failed"
        return Finding(Verdict.OK)

    with pytest.raises(pytest.skip.Exception):
        judge(measure, subject="corrected", strategy="fsdp1")
    (record,) = read_records(results)
    assert (record.verdict, record.reason) == (Verdict.UNTESTABLE, ARTEFACT.describe())
    assert record.evidence["suite"].startswith("AssertionError: training failed")


def test_an_assertion_beside_it_is_no_verdict(judge: Judge, results: Path) -> None:
    others = Life({}, {"of another strategy": ARTEFACT.describe()})

    def measure() -> Finding:
        assert others.failures, "no losses"
        return Finding(Verdict.OK)

    with pytest.raises(AssertionError, match="no losses"), nothing_skipped():
        judge(measure, subject="corrected", strategy="fsdp1")
    assert not results.exists()


def test_what_was_untestable_stays_so_when_a_sweep_goes_on(judge: Judge, results: Path) -> None:
    with pytest.raises(pytest.skip.Exception):
        judge(lambda: raising(failed(LACKING)), subject="upstream", strategy="fsdp1")
    again = Judge(issue=judge.issue, results=results, resume=True)
    with pytest.raises(pytest.skip.Exception, match="has no such kernel"):
        again(lambda: raising(AssertionError("measured again")), subject="upstream", strategy="fsdp1")
