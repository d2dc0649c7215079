"""A fake registry in place of the real one, and the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_trlcompat.bisect import candidates, commands
from pytest_trlcompat.bisect.candidates import commits, releases, stacks
from pytest_trlcompat.bisect.cli import main

from .fakes import TRANSFORMERS, FakeRegistry


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    """Twenty releases of transformers, ten days apart, and what came out beside them."""
    fake = FakeRegistry(
        tmp_path,
        {
            "transformers": dict(TRANSFORMERS),
            "trl": {"0.14.0": 5},
            "tokenizers": {"0.20": 0, "0.21": 95},
            "accelerate": {"1.0": 0, "1.1": 60, "1.2": 118, "1.3": 150},
        },
    )
    for module in (releases, commands):
        monkeypatch.setattr(module, "lock_for", fake.lock_for)
    for module in (stacks, commands):
        monkeypatch.setattr(module, "resolve", fake.resolve)
    for module in (candidates, commits):
        monkeypatch.setattr(module, "ensure", fake.ensure)
    monkeypatch.setattr(candidates, "compile_versions", fake.compile)
    monkeypatch.setattr(commands, "find_date", fake.find_date)
    monkeypatch.setattr(commands, "list_releases", fake.listing)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def bisect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``trlcompat bisect`` with these arguments in ``tmp_path``; returns the exit status."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> int:
        return main([*arguments, "--state", str(tmp_path / "state")])

    return run
