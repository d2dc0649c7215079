"""Packages of a project that the warm server imports: ranks have them at once, and are as clean as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError

CALM = """
import os, random, sys, threading, time

random.seed(99)
random.random()
os.environ["TRLCOMPAT_TEST_CALM"] = "set by its import"
sys.argv.append("--calm")
thread = threading.Thread(target=time.sleep, args=(0.2,))
thread.start()  # ends soon
time.sleep(0.3)
PID = os.getpid()
"""
REFUSED = {
    "threads": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), name='watcher', daemon=True).start()\n"
    ),
    "broken": "raise LookupError('no such thing')\n",
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "trlcompat_calm.py").write_text(CALM)
    for name, source in REFUSED.items():
        (tmp_path / f"trlcompat_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def look() -> dict[str, Any]:
    import os
    import random
    import sys
    import threading

    loaded = "trlcompat_calm" in sys.modules
    import trlcompat_calm  # type: ignore[import-not-found]

    return {
        "loaded": loaded,
        "imported_in": trlcompat_calm.PID,
        "server": os.getppid(),
        "random": random.random(),
        "variable": os.environ["TRLCOMPAT_TEST_CALM"],
        "argv": sys.argv,
        "threads": (threading.active_count(), len(os.listdir("/proc/self/task"))),
    }


def test_ranks_have_what_was_preloaded_and_nothing_else(packages: Path) -> None:
    with Launcher(device="cpu", preload=["trlcompat_calm"]) as launch:
        (seen,) = launch(look, strategy="single").values
        assert seen["loaded"] is True
        assert seen["imported_in"] == seen["server"]
        assert f"{seen['random']:.6f}" == "0.844422"  # random.seed(0)
        assert seen["variable"] == "set by its import"
        assert seen["argv"] == ["trlcompat-rank"]
        assert seen["threads"] == (1, 1)
        assert list(launch.preloaded) == ["trlcompat_calm"]
        assert launch.preloaded["trlcompat_calm"] >= 0.3
    with Launcher(device="cpu") as launch:
        (seen,) = launch(look, strategy="single").values
        assert (seen["loaded"], seen["imported_in"] == seen["server"], launch.preloaded) == (False, False, {})


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("trlcompat_threads", "started 1 thread (watcher), which ranks forked from here would not have"),
        ("trlcompat_broken", "failed: LookupError: no such thing"),
        ("trlcompat_nowhere", "failed: ModuleNotFoundError: No module named 'trlcompat_nowhere'"),
    ],
)
def test_what_would_not_survive_the_fork_is_refused(packages: Path, module: str, text: str) -> None:
    with Launcher(device="cpu", preload=["trlcompat_calm", module]) as launch:
        with pytest.raises(LaunchError) as caught:
            launch(look, strategy="single")
        assert f"trlcompat_preload: importing {module} {text}. Take {module} out of trlcompat_preload" in str(
            caught.value
        )
        assert not launch._servers
