"""The judge, where another known issue stops a suite, on one rank or on several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.attribution import failures_in
from pytest_trlcompat.catalog.issue import Prediction
from pytest_trlcompat.catalog.verdict import Verdict, read_records
from pytest_trlcompat.launch import Failure, LaunchError, LaunchResult, RankResult
from pytest_trlcompat.plugin.judging import Finding, Judge

from .judged import failed, nothing_skipped, raising

HOOKS = Failure(
    "AttributeError",
    "'DeepSpeedZeRoOffload' object has no attribute '_register_hooks_recursively'",
    "tb",
    ("AttributeError", "Exception"),
)
OLD = {"trl": "0.14.0", "transformers": "4.52.4", "accelerate": "1.7.0", "deepspeed": "0.16.9"}
TEXT = f"{HOOKS.type_name}: {HOOKS.message}"


@pytest.fixture
def stopped(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """``strategy-equivalence`` on a stack where ``deepspeed-hook-registration`` stops it under ZeRO-3."""
    monkeypatch.setattr(stack, "installed", lambda: OLD)
    judge.issue = known_issues.load().get_issue("strategy-equivalence")
    return judge


@pytest.mark.parametrize(
    "measure",
    [
        lambda: raising(failed(HOOKS)),
        lambda: Finding(Verdict.ERROR, {"failure": TEXT, "gathering": None}),
        lambda: Finding(Verdict.ERROR, {"type": HOOKS.type_name, "text": HOOKS.message, "traceback": "tb"}),
    ],
)
def test_a_failure_that_another_known_issue_explains_is_blocked_by_it(
    stopped: Judge, results: Path, measure: Callable[[], Finding]
) -> None:
    record = stopped(measure, subject="upstream", strategy="zero3")
    assert (record.verdict, record.expected, record.as_predicted) == (Verdict.BLOCKED, Verdict.BLOCKED, True)
    assert record.blocked_by == "deepspeed-hook-registration"
    assert record.evidence["symptoms_of"] == ["deepspeed-hook-registration"]
    (written,) = read_records(results)
    assert (written.verdict, written.blocked_by, written.evidence) == (
        record.verdict,
        record.blocked_by,
        record.evidence,
    )


def test_a_failure_that_nobody_explains_stays_an_error(stopped: Judge, results: Path) -> None:
    for evidence in ({"failure": "RuntimeError: out of memory"}, {"failures": {"a": TEXT, "b": "ValueError: x"}}):
        with pytest.raises(
            pytest.fail.Exception, match="the verdict is error; the catalogue predicts: blocked by deep"
        ):
            stopped(lambda found=evidence: Finding(Verdict.ERROR, found), subject="upstream", strategy="zero3")  # type: ignore[misc]
    assert read_records(results)[0].verdict is Verdict.ERROR


def test_a_hang_is_not_blocked_and_a_right_result_neither(stopped: Judge, results: Path) -> None:
    for measure in (lambda: raising(failed(None, timed_out=True)), lambda: Finding(Verdict.OK, {"once": TEXT})):
        with pytest.raises(pytest.fail.Exception):
            stopped(measure, subject="upstream", strategy="zero3")
    assert read_records(results)[0].verdict is Verdict.OK


def test_the_corrected_trainer_is_blocked_only_where_the_catalogue_says_so(stopped: Judge, results: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="the verdict is error"):
        stopped(lambda: raising(failed(HOOKS)), subject="corrected", strategy="zero3")
    predicted = Prediction(Verdict.BLOCKED, "corrected", {}, (), "w", "deepspeed-hook-registration")
    stopped.issue = replace(stopped.issue, predictions=(predicted,))
    assert stopped(lambda: raising(failed(HOOKS)), subject="corrected", strategy="zero3").verdict is Verdict.BLOCKED


def test_blocked_by_another_issue_than_predicted_fails_and_names_both(stopped: Judge, results: Path) -> None:
    predicted = Prediction(Verdict.BLOCKED, "upstream", {}, (), "w", "grpo-evaluate")
    stopped.issue = replace(stopped.issue, predictions=(predicted,))
    with pytest.raises(pytest.fail.Exception) as failure:
        stopped(lambda: raising(failed(HOOKS)), subject="upstream", strategy="zero3")
    text = str(failure.value)
    assert (
        "the verdict is blocked by deepspeed-hook-registration; the catalogue predicts: blocked by grpo-evaluate"
        in text
    )
    assert not read_records(results)[0].as_predicted


def test_blocked_where_nothing_is_predicted_passes_since_it_is_explained(stopped: Judge) -> None:
    stopped.issue = replace(stopped.issue, predictions=())
    record = stopped(lambda: raising(failed(HOOKS)), subject="upstream", strategy="zero3")
    assert (record.verdict, record.expected) == (Verdict.BLOCKED, None)


DEVICES = Failure("RuntimeError", "Expected all tensors to be on the same device", "", ("RuntimeError", "Exception"))
NEW = Failure("ValueError", "BRAND NEW unexplained", "tb", ("ValueError", "Exception"))
GONE = Failure("RuntimeError", "Connection closed by peer [127.0.0.1]:29500", "tb", ("RuntimeError", "Exception"))


def on_two_ranks(second: RankResult) -> LaunchError:
    """Rank 0 failed first, with the symptom of ``grpo-fsdp-ref-model``."""
    ranks = (RankResult(0, failure=DEVICES, exit_status=1, ended_at=1.0), second)
    return LaunchError("the launch failed", LaunchResult("train", "fsdp2", "software", ranks))


@pytest.mark.parametrize(
    ("second", "verdict", "kept"),
    [
        (RankResult(1, failure=NEW, exit_status=1, ended_at=1.01), Verdict.ERROR, "BRAND NEW unexplained"),
        (
            RankResult(1, exit_status=-11, ended_at=1.01),
            Verdict.ERROR,
            "rank 1 was killed by SIGSEGV after 0.0 s",
        ),
        (RankResult(1, failure=DEVICES, exit_status=1, ended_at=1.01), Verdict.BLOCKED, DEVICES.message),
        (RankResult(1, failure=GONE, exit_status=1, ended_at=1.01), Verdict.BLOCKED, None),
        (RankResult(1, exit_status=-9, ended_by_launcher="rank 0 failed", ended_at=1.01), Verdict.BLOCKED, None),
        (RankResult(1, returned=True, ended_at=0.5), Verdict.BLOCKED, None),
    ],
)
def test_what_every_rank_met_by_itself_must_be_explained(
    stopped: Judge, results: Path, second: RankResult, verdict: Verdict, kept: str | None
) -> None:
    fails = verdict is Verdict.ERROR
    with pytest.raises(pytest.fail.Exception, match="the verdict is error") if fails else nothing_skipped():
        stopped(lambda: raising(on_two_ranks(second)), subject="upstream", strategy="fsdp2")
    (record,) = read_records(results)
    assert (record.verdict, record.expected) == (verdict, Verdict.BLOCKED)
    others = record.evidence.get("other_ranks", {})
    assert [other["message"] for other in others.values()] == ([] if kept is None else [kept])


def test_another_ranks_failure_in_a_suites_evidence_must_be_explained_too(stopped: Judge, results: Path) -> None:
    evidence = {"failure": TEXT, "failures_of_other_ranks": ["ValueError: BRAND NEW unexplained"]}
    with pytest.raises(pytest.fail.Exception, match="the verdict is error"):
        stopped(lambda: Finding(Verdict.ERROR, evidence), subject="upstream", strategy="zero3")
    assert read_records(results)[0].verdict is Verdict.ERROR


def test_a_symptoms_words_do_not_explain_a_failure_elsewhere(stopped: Judge, results: Path) -> None:
    optimizer = (
        'Traceback (most recent call last):\n  File "/e/site-packages/torch/optim/adamw.py", line 3, in _fused\n'
    )
    elsewhere = replace(DEVICES, traceback=f"{optimizer}RuntimeError: {DEVICES.message}\n")
    with pytest.raises(pytest.fail.Exception, match="the verdict is error"):
        stopped(lambda: raising(failed(elsewhere)), subject="upstream", strategy="fsdp2")
    assert read_records(results)[0].verdict is Verdict.ERROR


def test_a_location_counts_though_the_traceback_was_cut(stopped: Judge, results: Path) -> None:
    """The function that tells it apart is far out, and the traceback that is kept ends with the innermost."""
    site = '  File "/e/site-packages/'
    outer = f'{site}trl/trainer/grpo_trainer.py", line 3, in get_per_token_logps\n    call\n'
    inner = f'{site}torch/nn/functional.py", line 3, in embedding\n    {"x" * 5000}\n'
    text = f"Traceback (most recent call last):\n{outer}{inner}RuntimeError: {DEVICES.message}\n"
    record = stopped(lambda: raising(failed(replace(DEVICES, traceback=text))), subject="upstream", strategy="fsdp2")
    assert record.blocked_by == "grpo-fsdp-ref-model"
    assert record.evidence["location"] == (
        "torch/nn/functional.py:embedding < trl/trainer/grpo_trainer.py:get_per_token_logps"
    )
    assert "trl/trainer" not in record.evidence["traceback"]
    (written,) = read_records(results)
    (kept,) = failures_in(written.evidence)
    assert kept.location == record.evidence["location"]
    (old,) = failures_in({name: value for name, value in written.evidence.items() if name != "location"})
    assert old.location == ""
