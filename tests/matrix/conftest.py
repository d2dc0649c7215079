"""A checkout whose cell has a fake lock and environment, and a report of cells that are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_trlcompat.catalog.verdict import Record, append_record
from pytest_trlcompat.matrix import disk
from pytest_trlcompat.matrix import job as job_module
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.report.model import Report, gather
from pytest_trlcompat.matrix.results import Sidecar

from .made_up import LOCK, Stage, make_stage
from .made_up_report import CRASH, FINE, GONE, NEW, OLD, PREDICTED, SURPRISE, UNBUILT


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The checkout; its cell runs in this process."""
    stage = make_stage(tmp_path)
    monkeypatch.setattr(job_module, "lock_for", lambda matrix, cell, layout: LOCK)
    monkeypatch.setattr(disk, "free_space", lambda *arguments: None)
    monkeypatch.setattr(job_module, "ensure", lambda lock, layout, say: Environment(tmp_path / "env"))
    return stage


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Path]:
    """Writes cells with their verdicts into a folder, and returns it."""

    def write(*cells: tuple[Sidecar, tuple[Record, ...]]) -> Path:
        for sidecar, records in cells:
            (tmp_path / f"{sidecar.id}.cell.json").write_text(sidecar.to_json())
            for record in records:
                append_record(tmp_path / f"{sidecar.id}.jsonl", record)
        return tmp_path

    return write


@pytest.fixture
def report(results: Callable[..., Path]) -> Report:
    """Of a new cell, in which something is wrong, an old one, and one that could not be built."""
    return gather(results((NEW, (FINE, PREDICTED, SURPRISE, CRASH, GONE)), (OLD, (FINE,)), (UNBUILT, ())))
