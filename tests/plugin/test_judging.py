"""The judge: from a measurement to a verdict, a JSON line, and a test that passes or fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.accelerator.artefacts import Artefact, What
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import Prediction
from pytest_trlcompat.catalog.verdict import Verdict, read_records
from pytest_trlcompat.launch import Failure, LaunchError, LaunchResult, RankResult, StrategyAbsent
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge, Untestable

ISSUE = "grpo-fsdp-ref-model"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "cell.jsonl"


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, results: Path) -> Judge:
    """With trl 0.15.2, for which the catalogue predicts ``broken`` for upstream."""
    monkeypatch.setattr(stack, "installed", lambda: {"trl": "0.15.2", "accelerate": "1.7.0"})
    return Judge(issue=known_issues.load().get_issue(ISSUE), results=results)


def failed(failure: Failure | None, timed_out: bool = False) -> LaunchError:
    ranks = (RankResult(rank=0, failure=failure, exit_status=1),)
    return LaunchError("the launch failed", LaunchResult("train", "fsdp1", "software", ranks, timed_out))


@contextlib.contextmanager
def nothing_skipped() -> Iterator[None]:
    """A judge that skips would skip the test of it as well, where it is to fail."""
    try:
        yield
    except pytest.skip.Exception as skipped:
        raise LookupError(f"skipped: {skipped}") from None


def raising(error: Exception) -> Finding:
    raise error


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
        assert f"correct the entry '{ISSUE}' in pytest_trlcompat/catalog/catalog.toml" in text
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


def test_an_assertion_of_the_suite_itself_is_no_verdict(judge: Judge, results: Path) -> None:
    with pytest.raises(AssertionError, match="the suite is wrong"):
        judge(lambda: raising(AssertionError("the suite is wrong")), subject="upstream", strategy="fsdp1")
    assert not results.exists()


# ---- what the software accelerator cannot do

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


# ---- what another known issue stops

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


def test_a_training_keeps_what_every_rank_failed_with() -> None:
    from suites.sharding.trainings import Training

    def failing(*texts: str | None) -> Training:
        return Training([{"failure": text} for text in texts], {}, Path())

    gone = f"{GONE.type_name}: {GONE.message}"
    assert failing(None, None).failure is None
    assert failing(None, TEXT).failure == TEXT
    assert failing(TEXT, TEXT).failures_of_other_ranks == {}
    both = failing(TEXT, "ValueError: BRAND NEW unexplained")
    assert (both.failure, both.failures_of_other_ranks) == (
        TEXT,
        {"failures_of_other_ranks": ["ValueError: BRAND NEW unexplained"]},
    )
    waiting = failing(gone, TEXT)
    assert (waiting.failure, waiting.failures_of_other_ranks) == (TEXT, {})
    assert failing(gone, None).failure == gone


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
