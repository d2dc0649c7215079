"""The doctor's program in this process, and a small catalogue for it."""

from __future__ import annotations

import pytest

from pytest_trlcompat import cli
from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.evidence import Evidence
from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.catalog.known_issues import Catalog

from .made_up import Run, cell, issue, predict


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``trlcompat doctor`` in this process, with the published evidence: status, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["doctor", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> KnownIssue:
    """A catalogue of one issue, and evidence of two cells, instead of the real ones."""
    entry = issue(predict("broken", ("zero3",), trl="<0.18"), predict("ok"))
    cells = (cell("0.15.2", single="ok", zero3="broken"), cell("0.18.2", single="ok", zero3="ok"))
    monkeypatch.setattr(known_issues, "load", lambda: Catalog({entry.id: entry}))
    monkeypatch.setattr(evidence, "published", lambda: Evidence("2026-11-21", cells))
    return entry
