"""Where temporary files lie, whatever the folders are like, and that they go with the test process; no stack."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pytest_trlcompat._cleaner import OwnFolder
from pytest_trlcompat.launch import Launcher, LaunchError, LaunchWarning

from .processes import output_of, permitted, program, unprivileged, wait_until, wait_until_gone

PRINTS_WHERE = (
    "import os\n"
    "from pytest_trlcompat.launch import Launcher\n"
    "with Launcher(device='cpu') as launch:\n"
    "    print(launch(lambda: os.environ['TMPDIR'], strategy='single').values[0])\n"
)
LEAVES_A_DAEMON = (
    "import os, subprocess, sys, time\n"
    "from pytest_trlcompat.launch import Launcher\n"
    "def body(name):\n"
    "    import tempfile\n"
    "    tempfile.mkstemp()\n"
    "    daemon = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "    open(name + '.new', 'w').write(f'{os.getpid()} {os.getppid()} {daemon.pid}')\n"
    "    os.rename(name + '.new', name)\n"
    "    time.sleep(600)\n"
    "with Launcher(device='cpu') as launch:\n"
    "    launch(body, sys.argv[1], strategy='single')\n"
)


def begin(folder: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A program amidst a launch whose temporary files are below ``folder``, and its rank, server and daemon."""
    pids = folder.with_name("pids")
    process = subprocess.Popen([*program(LEAVES_A_DAEMON), str(pids)], env={**os.environ, "TMPDIR": str(folder)})
    wait_until(lambda: pids.exists() or process.poll() is not None, "the launch has not begun")
    (made,) = folder.iterdir()
    assert list((made / "tmp").iterdir())
    return process, [int(pid) for pid in pids.read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.fault(
    "The test process is killed by SIGKILL, SIGTERM or SIGHUP in a launch.",
    "Server, ranks and their daemons end, and the folder for temporary files is removed.",
)
def test_a_killed_test_process_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "t").mkdir()
    process, pids = begin(tmp_path / "t")
    process.send_signal(number)
    assert process.wait() == -number
    for pid in pids:
        wait_until_gone(pid)
    wait_until(lambda: not list((tmp_path / "t").iterdir()), "the folder is still there")


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.fault(
    "The test process and its server are killed at once, or the server had been stopped.",
    "What the ranks had started is found by its environment and ended, and the folder is removed.",
)
def test_test_process_and_server_are_killed_at_once(tmp_path: Path, stopped: bool) -> None:
    (tmp_path / "t").mkdir()
    process, pids = begin(tmp_path / "t")
    os.kill(pids[1], signal.SIGSTOP if stopped else signal.SIGKILL)
    process.kill()
    process.wait()
    for pid in pids:
        wait_until_gone(pid)
    wait_until(lambda: not list((tmp_path / "t").iterdir()), "the folder is still there")


@pytest.mark.fault(
    "A process that the test process had forked outlives it.",
    "It holds the connection to the server open; server and folder go nevertheless.",
)
def test_a_forked_copy_of_the_test_process_outlives_it(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    text = (
        f"{PRINTS_WHERE}    server = launch(os.getppid, strategy='single').values[0]\n"
        "    copy = os.fork()\n"
        "    if copy:\n"
        "        print(server, copy, flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
        "    import time\n"
        "    time.sleep(600)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "t")}
    with subprocess.Popen(program(text), env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        _, pids = process.stdout.readline(), process.stdout.readline()
        server, copy = map(int, pids.split())
        try:
            wait_until_gone(server)
            wait_until(lambda: not list((tmp_path / "t").iterdir()), "the folder is still there")
        finally:
            os.kill(copy, signal.SIGKILL)


def test_a_launcher_that_is_never_closed_leaves_nothing(tmp_path: Path) -> None:
    text = (
        "import os\nfrom pytest_trlcompat.launch import Launcher\n"
        "print(Launcher(device='cpu')(lambda: 7, strategy='single').values, len(os.listdir(os.environ['TMPDIR'])))\n"
    )
    assert output_of(program(text), TMPDIR=str(tmp_path)) == "[7] 1\n"
    wait_until(lambda: not list(tmp_path.iterdir()), "the folder is still there")


def test_a_folder_that_took_the_place_of_ours_is_spared(tmp_path: Path) -> None:
    made = tmp_path / "own"
    made.mkdir()
    own = OwnFolder(made, "TRLCOMPAT_LAUNCHER=none")
    made.rename(tmp_path / "moved")
    made.mkdir()
    (made / "theirs").touch()
    assert not own.exists
    own.remove()
    assert (made / "theirs").exists()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "moved")
    own = OwnFolder(tmp_path / "moved", "TRLCOMPAT_LAUNCHER=none")
    own.path = link
    own.remove()
    assert (tmp_path / "moved").exists()


@pytest.mark.fault(
    "The folder for temporary files is deleted between two launches.",
    "A warning says so, and the same server makes the next launch with a new folder.",
)
def test_a_vanished_folder_is_made_again() -> None:
    def look() -> tuple[int, str, bool]:
        with tempfile.TemporaryFile() as file:
            return os.getppid(), os.environ["TMPDIR"], file.writable()

    with Launcher(device="cpu") as launch:
        server, before, _ = launch(look, strategy="single").values[0]
        shutil.rmtree(Path(before).parent)
        with pytest.warns(LaunchWarning, match=f"{Path(before).parent}, has vanished; a new one is made") as warned:
            same, after, works = launch(look, strategy="single").values[0]
        assert warned[0].filename == __file__
        assert (same, works) == (server, True)
        assert after != before
        shutil.rmtree(after)
        assert launch(look, strategy="single").values == [(server, after, True)]
    assert not Path(after).parent.exists()


@pytest.mark.fault(
    "The folder for temporary files is deleted in a launch.", "The launch returns its result, and the next one works."
)
def test_a_folder_that_vanishes_in_a_launch() -> None:
    with Launcher(device="cpu") as launch:
        launch(lambda: shutil.rmtree(Path(os.environ["TMPDIR"]).parent), strategy="single")
        with pytest.warns(LaunchWarning, match="has vanished"):
            assert launch(lambda: 7, strategy="single").values == [7]


@pytest.mark.fault("`TMPDIR` does not exist.", "Temporary files lie in the system's folder for them.")
def test_a_tmpdir_that_does_not_exist(tmp_path: Path) -> None:
    where = Path(output_of(program(PRINTS_WHERE), TMPDIR=str(tmp_path / "none")).strip())
    assert where.parent.name.startswith("trlcompat-")
    assert tmp_path not in where.parents
    assert not where.parent.exists()


@pytest.mark.fault("`TMPDIR` is not writable.", "Temporary files lie in the system's folder for them.")
def test_a_tmpdir_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir(mode=0o500)
    command = [*unprivileged(), *program(PRINTS_WHERE)]
    where = Path(output_of(command, TMPDIR=str(tmp_path / "t"), TRLCOMPAT_CACHE="/nonexistent").strip())
    assert tmp_path not in where.parents
    assert not where.parent.exists()


@pytest.mark.fault(
    "The folder that holds the temporary folders vanishes after the first launch.", "The launch fails, and names it."
)
def test_the_base_of_temporary_folders_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    with Launcher(device="cpu") as launch:
        launch(lambda: None, strategy="single")
        shutil.rmtree(tmp_path / "t")
        with (
            pytest.warns(LaunchWarning, match="has vanished"),
            pytest.raises(
                LaunchError, match=rf"the launch could not begin: FileNotFoundError: .*'{tmp_path}/t/trlcompat-"
            ),
        ):
            launch(lambda: None, strategy="single")
        (tmp_path / "t").mkdir()
        assert launch(lambda: 7, strategy="single").values == [7]


@pytest.mark.fault(
    "`TMPDIR` is longer than the 107 bytes of a Unix socket's path.", "Warm launches work; cold ones, see below."
)
def test_a_long_tmpdir(tmp_path: Path) -> None:
    long = tmp_path / ("t" * 120)
    long.mkdir()
    where = Path(output_of(program(PRINTS_WHERE), TMPDIR=str(long)).strip())
    assert long in where.parents


@pytest.mark.fault("The disk of `TMPDIR` has no room for another file.", "The launch fails, and says so.")
def test_a_full_disk_when_a_launch_begins(tmp_path: Path) -> None:
    text = (
        "import os, tempfile\n"
        "from pytest_trlcompat.launch import Launcher, LaunchError\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "with Launcher(device='cpu') as launch:\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            print(launch(lambda: 7, strategy='single').values)\n"
        "        except LaunchError as error:\n"
        "            print(error)\n"
        "        os.system(f'mount -o remount,nr_inodes=100 {tempfile.tempdir}')\n"
    )
    mounted = ["sh", "-c", f'mount -t tmpfs -o nr_inodes=2 tmpfs {tmp_path} && exec "$@"', "sh"]
    failed, works = output_of([*permitted("unshare", "-m"), *mounted, *program(text)]).splitlines()
    assert failed.startswith("the launch could not begin: OSError: [Errno 28] No space left on device: ")
    assert failed.endswith(": no space, or no more files, in the folder for temporary files (`TMPDIR`)")
    assert works == "[7]"


@pytest.mark.fault(
    "The disk fills while a rank prints.", "The launch fails with the rank's OSError, and the next one works."
)
def test_a_disk_that_fills(tmp_path: Path) -> None:
    text = (
        "import os\n"
        "from pytest_trlcompat.launch import Launcher, LaunchError\n"
        "with Launcher(device='cpu') as launch:\n"
        "    try:\n"
        "        launch(lambda: print('x' * (8 << 20)), strategy='single')\n"
        "    except LaunchError as error:\n"
        "        print(error)\n"
        "    print(launch(lambda: 7, strategy='single').values)\n"
    )
    mounted = ["sh", "-c", f'mount -t tmpfs -o size=2m tmpfs {tmp_path} && exec "$@"', "sh"]
    printed = output_of([*permitted("unshare", "-m"), *mounted, *program(text)], TMPDIR=str(tmp_path)).splitlines()
    assert "first observed failure: rank 0 raised OSError" in printed[0]
    assert "OSError: [Errno 28] No space left on device" in printed
    assert printed[-1] == "[7]"


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.fault("`HOME` is not set, nor has the user an entry in the system's list.", "Launches work.")
def test_no_home(tmp_path: Path, known: bool) -> None:
    tmp_path.chmod(0o777)
    before = [] if known else unprivileged()
    if before:
        before = [word.replace("65534", "54321") for word in before]
    elif not known:
        pytest.skip("needs root, to take on a user without an entry")
    command = ["env", "-u", "HOME", "-u", "XDG_CACHE_HOME", "-u", "TRLCOMPAT_CACHE", *before, *program(PRINTS_WHERE)]
    assert Path(output_of(command, TMPDIR=str(tmp_path)).strip()).parents[1] == tmp_path


@pytest.mark.fault("The working directory was deleted.", "The launch is refused, with that reason.")
def test_a_deleted_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Launcher(device="cpu") as launch:
        (tmp_path / "w").mkdir()
        monkeypatch.chdir(tmp_path / "w")
        (tmp_path / "w").rmdir()
        with pytest.raises(LaunchError, match="^the test process's working directory does not exist any more"):
            launch(lambda: None, strategy="single")


def test_the_programs_of_these_tests_have_this_path() -> None:
    assert output_of(program("import sys; print(sys.path)")) == f"{sys.path}\n"
