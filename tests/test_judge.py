"""The room ``judge``: from a measurement to a verdict, a JSON line, and a test that passes or fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat import catalog, stack
from pytest_trlcompat.judge import Absent, Finding, Judge
from pytest_trlcompat.launch import Failure, LaunchError, LaunchResult, RankResult
from pytest_trlcompat.verdict import Verdict, read_records

ISSUE = "grpo-fsdp-ref-model"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "cell.jsonl"


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, results: Path) -> Judge:
    """With trl 0.15.2, for which the catalogue predicts ``broken`` for upstream."""
    monkeypatch.setattr(stack, "installed", lambda: {"trl": "0.15.2", "accelerate": "1.7.0"})
    return Judge(issue=catalog.load().get_issue(ISSUE), results=results)


def failed(failure: Failure | None, timed_out: bool = False) -> LaunchError:
    ranks = (RankResult(rank=0, failure=failure, exit_status=1),)
    return LaunchError("the launch failed", LaunchResult("train", "fsdp1", "software", ranks, timed_out))


def raising(error: Exception) -> Finding:
    raise error


def test_a_right_prediction_passes_and_is_recorded(judge: Judge, results: Path) -> None:
    record = judge(lambda: Finding(Verdict.BROKEN, {"ref_device": "cpu"}), subject="upstream", strategy="fsdp1")
    assert record.as_predicted
    assert read_records(results) == [read_records(results)[0]]
    assert (record.verdict, record.expected, record.evidence) == (Verdict.BROKEN, Verdict.BROKEN, {"ref_device": "cpu"})
    assert judge.properties == [("trlcompat", record.to_json())]


def test_a_wrong_prediction_fails_in_either_direction_and_names_the_line_to_mend(judge: Judge, results: Path) -> None:
    for verdict, subject in ((Verdict.OK, "upstream"), (Verdict.BROKEN, "corrected")):
        with pytest.raises(pytest.fail.Exception) as failure:
            judge(lambda verdict=verdict: Finding(verdict, {"n": 3}), subject=subject, strategy="fsdp1")  # type: ignore[misc]
        text = str(failure.value)
        assert f"{ISSUE}, {subject}, fsdp1: the verdict is {verdict}; the catalogue predicts: " in text
        assert "  n: 3" in text
        assert f"mend the entry '{ISSUE}' in pytest_trlcompat/catalog.toml" in text
    assert len(read_records(results)) == 2


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (
            failed(Failure("RuntimeError", "Expected all tensors to be on the same device", "", ("RuntimeError",))),
            "broken",
        ),
        (failed(Failure("KeyError", "True", "tb", ("KeyError",))), "broken"),
        (failed(Failure("RuntimeError", "out of memory", "tb", ("RuntimeError",))), "error"),
        (failed(None, timed_out=True), "hang"),
        (failed(None), "error"),
        (LaunchError("no server"), "error"),
    ],
)
def test_a_failed_launch_is_classified(judge: Judge, results: Path, error: LaunchError, verdict: str) -> None:
    try:
        judge(lambda: raising(error), subject="upstream", strategy="fsdp1")
    except pytest.fail.Exception:
        assert verdict != "broken"
    assert read_records(results)[0].verdict.value == verdict


def test_absent_passes_for_corrected(judge: Judge, results: Path) -> None:
    record = judge(lambda: raising(Absent("no such trainer")), subject="corrected", strategy="fsdp1")
    assert (record.verdict, record.evidence) == (Verdict.ABSENT, {"reason": "no such trainer"})


def test_without_a_prediction_only_error_and_hang_fail(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"accelerate": "1.7.0"})
    assert judge(lambda: Finding(Verdict.SILENT), subject="upstream", strategy="fsdp1").expected is None
    with pytest.raises(pytest.fail.Exception, match="the verdict is error; the catalogue predicts nothing here"):
        judge(lambda: raising(failed(None)), subject="upstream", strategy="fsdp2")


def test_resume_measures_nothing_twice_and_keeps_failing(judge: Judge, results: Path) -> None:
    judge(lambda: Finding(Verdict.BROKEN), subject="upstream", strategy="fsdp1")
    with pytest.raises(pytest.fail.Exception):
        judge(lambda: Finding(Verdict.OK), subject="upstream", strategy="fsdp2")
    again = Judge(issue=judge.issue, results=results, resume=True)
    again(lambda: raising(AssertionError("measured again")), subject="upstream", strategy="fsdp1")
    with pytest.raises(pytest.fail.Exception, match="the verdict is ok"):
        again(lambda: raising(AssertionError("measured again")), subject="upstream", strategy="fsdp2")
    assert len(results.read_text().splitlines()) == 2


def test_an_assertion_of_the_suite_itself_is_no_verdict(judge: Judge, results: Path) -> None:
    with pytest.raises(AssertionError, match="the suite is wrong"):
        judge(lambda: raising(AssertionError("the suite is wrong")), subject="upstream", strategy="fsdp1")
    assert not results.exists()
