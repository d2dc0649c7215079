"""The doctor's program in this process, a small catalogue for it, and what it reads of a stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat import cli
from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.evidence import Evidence
from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.doctor.alternatives import Asked
from pytest_trlcompat.doctor.request import read_stack_spec
from pytest_trlcompat.doctor.stack_spec import StackSpec

from .asking import Ask
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


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Write files into a temporary folder and read a stack there."""
    monkeypatch.chdir(tmp_path)

    def ask(
        *words: str,
        r: tuple[str, ...] = (),
        stdin: str | bytes = b"",
        python: str = "",
        platform: str = "",
        **files: str | bytes,
    ) -> StackSpec:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        return read_stack_spec(words, r, lambda most: data[:most], Asked(python, platform))

    return ask
