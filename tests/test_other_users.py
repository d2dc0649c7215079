"""Files of one user that another may read: nobody holds our locks for ever, or has us use what is theirs."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from pytest_trlcompat._trust import open_lock
from pytest_trlcompat.bisect.candidates.commits import _one_at_a_time
from pytest_trlcompat.catalog import verdict
from pytest_trlcompat.catalog.verdict import append_record, read_records
from pytest_trlcompat.launch import children
from pytest_trlcompat.matrix.files import in_use, locked, unless_in_use
from tests.matrix.made_up import BROKEN, OK

from .stranger import STRANGER, called, needs_root, open_folder, tried, trying

BUILD = importlib.import_module("pytest_trlcompat.accelerator.build")  # the package has a function of that name
HOLD = """
file = []
def hold():
    file.append(os.open(sys.argv[1], os.O_RDONLY))
    fcntl.flock(file[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
print(attempt(hold), flush=True)
"""
LOCKS: dict[str, tuple[str, Callable[[Path], AbstractContextManager[object]]]] = {
    "locked": ("name.lock", locked),
    "in_use": ("name.used", in_use),
    "unless_in_use": ("name.used", unless_in_use),
    "accelerator": ("name.lock", lambda path: BUILD._locked(path, lambda line: None)),
    "commits": (".worktrees.lock", lambda path: _one_at_a_time(path.parent)),
}


def entered(lock: AbstractContextManager[object], seconds: float = 20) -> bool:
    """Whether a lock is ours before long, in a thread, since it may wait for ever."""
    inside = threading.Event()

    def enter() -> None:
        with contextlib.suppress(OSError), lock:
            inside.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(seconds)
    return inside.is_set()


@needs_root
@pytest.mark.parametrize("earlier", [False, True], ids=["new", "of an earlier release"])
@pytest.mark.parametrize("kind", LOCKS)
def test_another_user_cannot_hold_a_lock(kind: str, earlier: bool) -> None:
    """Who can read a file can lock it: any user of the machine had a sweep, a build or `nox -s clean` wait for ever."""
    name, lock = LOCKS[kind]
    with open_folder() as folder:
        path = folder / name
        if earlier:
            path.touch(0o644)
        with lock(path):
            pass
        with trying(HOLD, path) as outcome:
            assert entered(lock(path), 5)
        assert outcome == "PermissionError"
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_a_group_that_may_write_may_lock(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        open_lock(tmp_path / "shared").close()
    finally:
        os.umask(before)
    open_lock(tmp_path / "own").close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"shared": 0o660, "own": 0o600}
    (tmp_path / "own").chmod(0o644)
    open_lock(tmp_path / "own").close()
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o600


def test_a_lock_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        open_lock(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(verdict, "_LOCK_PATIENCE", 0.2)
    verdict._held_by_others.clear()
    yield
    verdict._held_by_others.clear()


@needs_root
@pytest.mark.usefixtures("patient")
def test_verdicts_are_written_although_another_user_holds_their_file() -> None:
    """Results are there to be read, so their file can be locked; a suite waited for whoever did so."""
    with open_folder() as folder:
        path = folder / "results.jsonl"
        append_record(path, OK)
        with trying(HOLD, path) as outcome:
            writer = threading.Thread(target=append_record, args=(path, BROKEN), daemon=True)
            writer.start()
            writer.join(20)
            assert not writer.is_alive()
        assert outcome == "it worked"
        assert read_records(path) == [OK, BROKEN]


@pytest.mark.usefixtures("patient")
def test_a_file_that_is_held_is_waited_for_once(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_record(path, OK)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        append_record(path, OK)
        assert verdict._held_by_others == {path}


@needs_root
@pytest.mark.parametrize("whose", ["the stranger's", "of its folder's owner"])
def test_no_verdict_is_added_to_a_file_of_another_user(whose: str) -> None:
    """In /tmp, say: what stands there already is the stranger's, and what we add they can change."""
    with open_folder() as folder:
        path = folder / "results.jsonl"
        path.touch()
        os.chown(path, STRANGER, STRANGER)
        if whose == "the stranger's":
            with pytest.raises(PermissionError, match=f"it belongs to the user with the id {STRANGER}"):
                append_record(path, OK)
            assert path.read_text() == ""
        else:
            os.chown(folder, STRANGER, STRANGER)
            append_record(path, OK)
            assert read_records(path) == [OK]


@needs_root
def test_a_semaphore_of_another_user_ends_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All see the names in /dev/shm, and may add one with the prefix of a launch's own, which we cannot remove."""
    with open_folder() as folder:
        monkeypatch.setattr(children, "_SHARED_MEMORY", folder)
        folder.chmod(0o1777)
        (folder / "sem.launch-theirs").touch()
        (folder / "sem.launch-ours").touch()
        os.chown(folder / "sem.launch-ours", STRANGER, STRANGER)
        assert called(lambda: children._remove_semaphores("launch")) == "it worked"
        assert [path.name for path in folder.iterdir()] == ["sem.launch-theirs"]


SHARED = ("gettempdir", '"/tmp"', "'/tmp'", "/var/tmp", "/dev/shm")
ALLOWED = {
    (
        "accelerator/standin/torch_npu/_notes_file.py",
        "gettempdir",
    ): "a name that mkstemp has chosen, checked before use",
    ("inference/cpu_engine.py", "/dev/shm"): "a name of vLLM's, which is given a random part",
    ("launch/children.py", "/dev/shm"): "names of this launch, removed; a stranger's are left",
    ("matrix/engines/cluster.py", '"/tmp"'): "for mkdtemp: names of Ray's sockets would be too long elsewhere",
    ("matrix/engines/own_cluster.py", '"/tmp"'): "a file of Ray's, whose owner is checked",
}
"""Where the package names a folder that all users write to, and why nobody is waiting there."""


def test_no_name_in_a_folder_of_all_users_is_known_before() -> None:
    """mkdtemp and mkstemp choose names that nobody has, and make them for this user alone; whatever else is listed."""
    package = Path(verdict.__file__).parents[1]
    found = {
        (path.relative_to(package).as_posix(), word)
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        for word in SHARED
        if word in line and not line.lstrip().startswith(("#", '"""'))
    }
    assert found == set(ALLOWED)


@needs_root
def test_the_stranger_of_these_tests_is_one() -> None:
    with open_folder() as folder:
        (folder / "ours").write_text("x")
        code = "print(os.getuid(), attempt(lambda: open(sys.argv[1], 'a')), attempt(lambda: open(sys.argv[1])))"
        assert tried(code, folder / "ours") == f"{STRANGER} PermissionError it worked"
