"""Which variables a server's imports read, and which launches need another server."""

from __future__ import annotations

import os

import pytest

from pytest_trlcompat.launch.import_variables import differing, recorded


def test_what_is_read_is_recorded_however_it_is_read_and_also_if_it_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "1")
    plain = type(os.environ)
    with recorded() as names:
        assert os.environ["SET"] == os.environ.get("SET") == "1"
        assert os.getenv("BY_GETENV", "default") == "default"
        assert "BY_IN" not in os.environ
        os.environ.setdefault("BY_SETDEFAULT", "1")
    assert names == {"SET", "BY_GETENV", "BY_IN", "BY_SETDEFAULT"}
    assert type(os.environ) is plain
    os.environ.get("AFTERWARDS")
    assert "AFTERWARDS" not in names
    monkeypatch.delenv("BY_SETDEFAULT")


def test_a_launch_differs_by_what_was_read_alone() -> None:
    names = frozenset({"HF_HOME", "HF_HUB_OFFLINE", "UNCHANGED", "RANK", "ACCELERATE_USE_FSDP", "TRLCOMPAT_X"})
    had = {"HF_HUB_OFFLINE": "1", "UNCHANGED": "1", "NOT_READ": "1", "RANK": "0"}
    given = {"HF_HOME": "/models", "UNCHANGED": "1", "NOT_READ": "2", "RANK": "1", "ACCELERATE_USE_FSDP": "true"}
    assert differing(names, had, given) == {("HF_HOME", "/models"), ("HF_HUB_OFFLINE", "")}
    assert differing(names, had, {**had, "TRLCOMPAT_X": "1"}) == frozenset()
