"""``--trlcompat-trainer``: what the end of a run says of a trainer; of what the cures say, a program tells instead."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.plugin import touched

ANSWER = {
    "trainers": ["grpo"],
    "cures": [
        {"active": True, "issues": ["grpo-one", "both"]},
        {"active": False, "issues": ["grpo-two", "both"]},
        {"active": None, "issues": ["fsdp-three"]},
    ],
}
ISSUES = ["both", "dpo-five", "fsdp-three", "grpo-four", "grpo-one", "grpo-two", "ppo-six"]


def says(monkeypatch: pytest.MonkeyPatch, status: int, out: str, err: str = "") -> list[list[str]]:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, status, out, err)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_issues_are_sorted_by_whether_they_bite(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = says(monkeypatch, 0, json.dumps(ANSWER))
    assert list(touched.lines("mine.train:MyTrainer", ISSUES)) == [
        "mine.train:MyTrainer, of the 7 known issues that TRL's own trainers showed here:",
        "    2 bite it, and cured(MyTrainer) cures them: both, grpo-one",
        "    1 bite it or not, by strategy, model and arguments; it cures those, too: fsdp-three",
        "    1 do not bite it: grpo-two",
        "    1 nobody can say: no cure looks for them: grpo-four",
        "    2 are of other trainers: dpo-five, ppo-six",
    ]
    assert asked[0][1:] == ["-m", "pytest_trlcompat", "cures", "mine.train:MyTrainer", "--json"]


def test_a_trainer_that_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, 2, "", "a warning\ntrlcompat cures: mine is not installed\n")
    assert list(touched.lines("mine:T", ISSUES)) == ["mine:T: trlcompat cures: mine is not installed"]


def test_what_upstream_showed_counts_alone() -> None:
    records = [
        Record("b", "upstream", "ddp", Verdict.SILENT),
        Record("b", "upstream", "single", Verdict.BROKEN),
        Record("a", "upstream", "single", Verdict.HANG),
        Record("c", "corrected", "single", Verdict.SILENT),
        Record("d", "upstream", "single", Verdict.OK),
        Record("e", "upstream", "single", Verdict.UNTESTABLE),
    ]
    assert touched.shown(records) == ["a", "b"]
