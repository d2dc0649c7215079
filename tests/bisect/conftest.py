"""The made-up registry in the real one's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat.bisect import commands
from pytest_trlcompat.bisect.candidates import base, commits, releases, stacks

from .made_up import TRANSFORMERS, Registry


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Twenty releases of transformers, ten days apart, and what came out beside them."""
    made = Registry(
        tmp_path,
        {
            "transformers": dict(TRANSFORMERS),
            "trl": {"0.14.0": 5},
            "tokenizers": {"0.20": 0, "0.21": 95},
            "accelerate": {"1.0": 0, "1.1": 60, "1.2": 118, "1.3": 150},
        },
    )
    for room in (releases, commands):
        monkeypatch.setattr(room, "lock_for", made.lock_for)
    for room in (stacks, commands):
        monkeypatch.setattr(room, "resolve", made.resolve)
    for room in (base, commits):
        monkeypatch.setattr(room, "ensure", made.ensure)
    monkeypatch.setattr(base, "compile_versions", made.compile)
    monkeypatch.setattr(commands, "find_date", made.find_date)
    monkeypatch.setattr(commands, "list_releases", made.listing)
    monkeypatch.chdir(tmp_path)
    return made
