"""A checkout whose cell has a fake lock and environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat.matrix import disk
from pytest_trlcompat.matrix import job as job_module
from pytest_trlcompat.matrix.environments import Environment

from .made_up import LOCK, Stage, make_stage


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The checkout; its cell runs in this process."""
    stage = make_stage(tmp_path)
    monkeypatch.setattr(job_module, "lock_for", lambda matrix, cell, layout: LOCK)
    monkeypatch.setattr(disk, "free_space", lambda *arguments: None)
    monkeypatch.setattr(job_module, "ensure", lambda lock, layout, say: Environment(tmp_path / "env"))
    return stage
