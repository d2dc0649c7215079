"""The judge: from a measurement to a verdict, a JSON line, and a test that passes or fails."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat._issue_ids import folder_of
from pytest_trlcompat._provenance import Provenance
from pytest_trlcompat.catalog.verdict import Verdict, read_records
from pytest_trlcompat.launch import Failure, LaunchError, StrategyAbsent
from pytest_trlcompat.plugin.judging import MEASURED_AGAIN, Absent, Finding, Judge, Untestable

from .judged import ISSUE, failed, raising


def test_a_right_prediction_passes_and_is_recorded(judge: Judge, results: Path) -> None:
    record = judge(lambda: Finding(Verdict.BROKEN, {"ref_device": "cpu"}), subject="upstream", strategy="fsdp1")
    assert record.as_predicted
    assert read_records(results) == [read_records(results)[0]]
    assert (record.verdict, record.expected, record.evidence) == (Verdict.BROKEN, Verdict.BROKEN, {"ref_device": "cpu"})
    assert judge.properties == [("trlcompat", record.to_json())]


def test_what_this_machine_cannot_show_is_untestable(judge: Judge, results: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="could not be tested; predicted is broken. there is one GPU"):
        judge(lambda: raising(Untestable("there is one GPU")), subject="upstream", strategy="fsdp1")
    (record,) = read_records(results)
    assert (record.verdict, record.evidence) == (Verdict.UNTESTABLE, {"reason": "there is one GPU"})


def test_on_one_gpu_suites_measure_in_one_process_alone(judge: Judge) -> None:
    from suites.conftest import _OnOneGPU

    measured: list[str] = []

    def measure() -> Finding:
        measured.append("once")
        return Finding(Verdict.OK)

    alone = _OnOneGPU(**vars(judge))
    with pytest.raises(pytest.skip.Exception, match="with two ranks, each on a GPU of its own"):
        alone(measure, subject="corrected", strategy="fsdp1-no_shard")
    assert not measured
    assert alone(measure, subject="corrected", strategy="single-head").verdict is Verdict.OK
    assert measured == ["once"]


def test_a_wrong_prediction_fails_in_either_direction_and_names_the_entry_to_correct(
    judge: Judge, results: Path
) -> None:
    for verdict, subject in ((Verdict.OK, "upstream"), (Verdict.BROKEN, "corrected")):
        with pytest.raises(pytest.fail.Exception) as failure:
            judge(lambda verdict=verdict: Finding(verdict, {"n": 3}), subject=subject, strategy="fsdp1")  # type: ignore[misc]
        text = str(failure.value)
        assert f"{ISSUE}, {subject}, fsdp1: the verdict is {verdict}; the catalogue predicts: " in text
        assert "  n: 3" in text
        assert f"correct the entry '{ISSUE}' in pytest_trlcompat/catalog/issues/{folder_of(ISSUE)}/{ISSUE}.toml" in text
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


@pytest.mark.parametrize("absent", [Absent("no such trainer"), StrategyAbsent("no such trainer")])
def test_absent_passes_for_corrected(judge: Judge, results: Path, absent: Exception) -> None:
    record = judge(lambda: raising(absent), subject="corrected", strategy="fsdp1")
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


@pytest.mark.parametrize(
    "recorded, why",
    [
        (Provenance("a" * 12, "b" * 12), "with other packages"),
        (Provenance("b" * 12, "a" * 12), "with other code"),
        (Provenance(), "with code and packages that nobody wrote down"),
    ],
)
def test_resume_measures_again_what_was_measured_otherwise_and_says_so(
    judge: Judge, results: Path, recorded: Provenance, why: str
) -> None:
    earlier = dataclasses.replace(judge, provenance=recorded)
    earlier(lambda: Finding(Verdict.BROKEN), subject="upstream", strategy="fsdp1")
    current = Provenance("a" * 12, "a" * 12)
    again = Judge(issue=judge.issue, results=results, resume=True, provenance=current)
    record = again(lambda: Finding(Verdict.BROKEN, {"again": 1}), subject="upstream", strategy="fsdp1")
    assert record.evidence == {"again": 1}
    assert (MEASURED_AGAIN, why) in again.properties
    assert [kept.provenance for kept in read_records(results)] == [str(current)]


def test_an_assertion_of_the_suite_itself_is_no_verdict(judge: Judge, results: Path) -> None:
    with pytest.raises(AssertionError, match="the suite is wrong"):
        judge(lambda: raising(AssertionError("the suite is wrong")), subject="upstream", strategy="fsdp1")
    assert not results.exists()
