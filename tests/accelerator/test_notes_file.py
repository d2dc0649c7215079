"""The file of the ranks' notes: found by a name that a store says, and never another file."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "pytest_trlcompat" / "accelerator" / "standin" / "torch_npu" / "_notes_file.py"
SIZE = 64


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("notes_file", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield module
    sys.modules.pop("notes_file", None)


def test_what_one_rank_makes_another_finds_until_it_is_removed(notes: ModuleType, tmp_path: Path) -> None:
    first, name = notes.create(SIZE)
    second = notes.open_existing(name, SIZE)
    assert os.path.sameopenfile(first, second)
    assert os.fstat(first).st_mode & 0o077 == 0
    notes.remove(name)
    assert list(tmp_path.iterdir()) == []
    assert notes.open_existing(name, SIZE) == -1
    os.close(first)
    os.close(second)


@pytest.mark.parametrize("how", ["absolute", "relative", "longer", "empty"])
def test_no_path_is_taken_for_a_name(notes: ModuleType, tmp_path: Path, how: str) -> None:
    """On several machines whoever reaches the store's port says the name; rank 1 opened whatever it was, to write."""
    precious = tmp_path / "below" / "trlcompat-notes-abcdefgh"
    precious.parent.mkdir()
    precious.write_bytes(b"\0" * SIZE)
    precious.chmod(0o600)
    names = {
        "absolute": str(precious),
        "relative": "below/trlcompat-notes-abcdefgh",
        "longer": "trlcompat-notes-abcdefgh/../below/trlcompat-notes-abcdefgh",
        "empty": "",
    }
    assert notes.open_existing(names[how], SIZE) == -1


@pytest.mark.parametrize("what", ["link", "other size", "readable", "folder", "pipe", "stranger's"])
def test_only_what_a_rank_of_this_user_has_made_is_opened(notes: ModuleType, tmp_path: Path, what: str) -> None:
    path = tmp_path / "trlcompat-notes-abcdefgh"
    if what == "link":
        (tmp_path / "precious").write_bytes(b"\0" * SIZE)
        (tmp_path / "precious").chmod(0o600)
        path.symlink_to(tmp_path / "precious")
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.write_bytes(b"\0" * (SIZE + (what == "other size")))
        path.chmod(0o644 if what == "readable" else 0o600)
    if what == "stranger's":
        if os.getuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(path, 65534, 65534)
    before = len(os.listdir("/proc/self/fd"))
    assert notes.open_existing(path.name, SIZE) == -1
    assert len(os.listdir("/proc/self/fd")) == before
