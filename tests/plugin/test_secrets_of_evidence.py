"""What the plugin writes and says of a failure has no secrets, and names what the verdict rests on all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.verdict import Record, Verdict, read_records
from pytest_trlcompat.launch import Failure, LaunchError, LaunchResult, RankResult
from pytest_trlcompat.plugin.judging import Finding, Judge

from .judged import failed, raising

SECRET = "q7Zp-11kd_Xw"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(stack, "installed", dict)  # nothing is predicted


@pytest.mark.parametrize("before", [0, 590, 595])
def test_evidence_of_a_failure_has_no_secret_not_even_where_it_is_cut(judge: Judge, results: Path, before: int) -> None:
    text = f"{'x' * before}{SECRET} for https://u:{SECRET}@host/?token=abc"
    failure = Failure("OSError", text, f"{text}{'y' * (4000 - len(text) + 4)}", ("OSError", "Exception"))
    with pytest.raises(pytest.fail.Exception) as caught:
        judge(lambda: raising(failed(failure)), subject="upstream", strategy="fsdp1")
    (record,) = read_records(results)
    assert record.evidence["message"] == f"{'x' * before}[redacted] for https://[redacted]@host/?token=[redacted]"[:600]
    assert (record.evidence["exception"], record.evidence["classes"]) == ("OSError", ["OSError", "Exception"])
    for said in (results.read_text(), str(caught.value), str(judge.properties)):
        assert not [piece for piece in (SECRET, SECRET[3:], SECRET[:6], "token=abc") if piece in said]
    assert judge.properties == [("trlcompat", record.to_json())]


def test_the_end_of_a_ranks_output_has_no_secret(judge: Judge, results: Path) -> None:
    rank = RankResult(rank=0, exit_status=1, stdout=f"login with {SECRET}", stderr="see https://a:b@host")
    launched = LaunchResult("train", "fsdp1", "software", (rank,), timed_out=True)
    error = LaunchError(launched.describe(), launched)
    shown = ["login with [redacted]", "see https://[redacted]@host"]
    assert [line for line in str(error).splitlines() if "login" in line or "see" in line] == shown
    assert str(LaunchError(f"it printed {SECRET}")) == "it printed [redacted]"
    with pytest.raises(pytest.fail.Exception):
        judge(lambda: raising(error), subject="upstream", strategy="fsdp1")
    (record,) = read_records(results)
    assert record.verdict is Verdict.HANG
    assert SECRET not in results.read_text()


def test_what_the_verdict_needs_stays(judge: Judge, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short value, a word, a version and the name of a known issue, though a variable calls each a secret."""
    for number, value in enumerate(("zero3", "transformers", "4.48.3.dev0", "AttributeError", "all-reduce")):
        monkeypatch.setenv(f"N{number}_TOKEN", value)
    text = "AttributeError: transformers 4.48.3.dev0 has no all-reduce under zero3"
    judge(lambda: Finding(Verdict.BROKEN, {"failure": text}), subject="upstream", strategy="fsdp1")
    assert read_records(results)[0].evidence == {"failure": text}


def test_the_name_of_what_blocked_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "grpo-fsdp2-offload-generation"
    monkeypatch.setenv("MY_SECRET", name)
    evidence = {"blocked_by": name, "symptoms_of": [name], "blocked_by_expected": name, "text": f"see {name}"}
    record = Record("grpo-a", "upstream", "fsdp2", Verdict.BLOCKED, Verdict.BLOCKED, evidence).without_secrets()
    assert (record.blocked_by, record.evidence["symptoms_of"]) == (name, [name])
    assert record.evidence["text"] == "see [redacted]"
