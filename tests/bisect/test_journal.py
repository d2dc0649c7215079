"""The journal: observations are kept at once; a truncated file is repaired, a damaged one refused."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.journal import Journal
from pytest_trlcompat.bisect.observation import Fingerprint, Observation
from pytest_trlcompat.matrix.locks import Lock

OK, BAD = Observation(passed={"a": "ok"}), Observation(reason="untestable: no")


def test_another_journal_of_the_same_folder_has_every_entry(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add("transformers==1", "transformers 1", "id-1", OK)
    journal.add("transformers==1", "transformers 1", "id-1", BAD)
    journal.alias("day", "id-1")
    again = Journal(tmp_path)
    assert [again.identity(name) for name in ("transformers==1", "day", "other")] == ["id-1", "id-1", None]
    assert again.observations("id-1") == [OK, BAD]
    assert again.observations(None) == []
    first = again.first("id-1")
    assert first is not None
    assert (first.label, first.observation) == ("transformers 1", OK)


def test_a_truncated_last_line_is_dropped_before_the_next_entry(tmp_path: Path) -> None:
    Journal(tmp_path).add("a", "a", "id-a", OK)
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"kind": "observation", "cand')
    journal = Journal(tmp_path)
    journal.add("b", "b", "id-b", OK)
    assert [entry.candidate for entry in Journal(tmp_path).entries] == ["a", "b"]


def test_a_damaged_line_is_refused_with_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"kind": "observation"}\n')
    with pytest.raises(BisectError, match=r"steps\.jsonl, line 1: not a step .* start over with --fresh"):
        Journal(tmp_path)


@pytest.mark.fault(
    "A journal of bisect holds a line that is no step, or is not UTF-8.",
    "The command names file and line, and with `--fresh` starts over.",
)
@pytest.mark.parametrize("text", [b"[]\n", b"\xff\n", b"[" * 100_000 + b"\n", b""])
def test_a_fresh_journal_is_empty_whatever_stood_there(tmp_path: Path, text: bytes) -> None:
    Journal(tmp_path).add("a", "a", "id-a", OK)
    with open(tmp_path / "steps.jsonl", "ab") as file:
        file.write(text)
    if text:
        with pytest.raises(BisectError, match=r"^.*steps\.jsonl(, line 2: not a step|: cannot be read) .*--fresh$"):
            Journal(tmp_path)
    assert Journal(tmp_path, fresh=True).observations("id-a") == []
    assert Journal(tmp_path).entries == []


def test_a_journal_holds_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "q7Zp-11kd")
    failed = {"command": Fingerprint("OSError", "401 for q7Zp-11kd", ("hub.py:get",))}
    seen = Observation(
        failed=failed, evidence={"command": {"output": "https://u:p@host q7Zp-11kd"}}, reason="q7Zp-11kd"
    )
    entry = Journal(tmp_path).add("a", "a", "id-a", seen)
    assert "q7Zp" not in (tmp_path / "steps.jsonl").read_text()
    assert Journal(tmp_path).entries == [entry]
    assert entry.observation.failed["command"] == Fingerprint("OSError", "401 for [redacted]", ("hub.py:get",))
    assert entry.observation.evidence == {"command": {"output": "https://[redacted]@host [redacted]"}}


def test_a_line_of_an_older_journal_is_read(tmp_path: Path) -> None:
    """Inconclusive checks were once called "untold"."""
    Journal(tmp_path).add("a", "a", "id-a", Observation(inconclusive={"zero3": "absent: no such trainer"}))
    path = tmp_path / "steps.jsonl"
    path.write_text(path.read_text().replace('"inconclusive"', '"untold"'))
    (observation,) = Journal(tmp_path).observations("id-a")
    assert observation == Observation(inconclusive={"zero3": "absent: no such trainer"})


def test_locks_are_kept_beside_it(tmp_path: Path) -> None:
    lock = Lock("cell", datetime.date(2025, 2, 1), "3.11", {"trl": "0.14.0"}, "x")
    journal = Journal(tmp_path)
    journal.keep_lock("id", lock)
    assert journal.lock("id") == lock
    assert journal.lock("other") is None
    assert journal.lock(None) is None
