"""A checkout whose cell's lock and environment are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat.matrix import disk
from pytest_trlcompat.matrix import job as room
from pytest_trlcompat.matrix.environments import Environment

from .made_up import LOCK, Stage, make_stage


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The checkout; its cell runs in this process."""
    stage = make_stage(tmp_path)
    monkeypatch.setattr(room, "lock_for", lambda matrix, cell, layout: LOCK)
    monkeypatch.setattr(disk, "make_room", lambda *arguments: None)
    monkeypatch.setattr(room, "ensure", lambda lock, layout, say: Environment(tmp_path / "env"))
    return stage
