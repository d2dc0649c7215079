"""The smaller parts of bisecting: pip's listing, locks near others, layouts, workers, and what is imported."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_trlcompat.bisect import layouts
from pytest_trlcompat.bisect.candidates import base as candidates
from pytest_trlcompat.bisect.candidates import registry
from pytest_trlcompat.bisect.candidates.registry import Listing, list_releases, parse
from pytest_trlcompat.bisect.candidates.releases import between
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.layouts import InstalledLayout, find_layout, state_folder
from pytest_trlcompat.bisect.progress import duration
from pytest_trlcompat.bisect.workers import Forked, WorkerDied
from pytest_trlcompat.matrix import environments
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock

ROOT = Path(__file__).resolve().parents[2]

PIP = """\
transformers (4.53.3)
  Skipping link: yanked for reason: Version was: not set: https://host/f/transformers-4.25.0-py3-none-any.whl#sha256=0 \
(from https://host/simple/transformers/) (requires-python:>=3.7.0)
  Skipping link: yanked for reason: <none given>: https://host/f/transformers-4.52.0.tar.gz#sha256=1 (from https://host/)
  Skipping link: not a file: https://host/f/other
Available versions: 4.53.3, 4.53.0, 5.0.0rc1, 4.9.2
"""


def test_pips_listing_is_read_with_what_was_yanked() -> None:
    assert parse("transformers", PIP, "2026-01-01") == Listing(
        "transformers",
        ("4.9.2", "4.53.0", "4.53.3", "5.0.0rc1"),
        {"4.25.0": "Version was: not set", "4.52.0": ""},
        "2026-01-01",
    )


def test_a_listing_is_kept_for_when_there_is_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        subprocess.CompletedProcess([], 0, PIP, ""),
        subprocess.CompletedProcess([], 1, "", "ERROR: Could not find a version\nERROR: No matching distribution\n"),
    ]
    monkeypatch.setattr(
        "pytest_trlcompat.bisect.candidates.registry.subprocess.run", lambda *words, **options: answers.pop(0)
    )
    monkeypatch.setattr(registry, "find_uv", lambda: "uv")
    monkeypatch.setattr(registry, "settings", lambda environ: {})
    first = list_releases("transformers", "3.11", tmp_path / "kept.json")
    assert list_releases("transformers", "3.11", tmp_path / "kept.json") == first
    answers.append(subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution\n"))
    with pytest.raises(BisectError, match="could not be listed: ERROR: No matching distribution\nIs there a network"):
        list_releases("transformers", "3.11", tmp_path / "other.json")


def test_both_ends_are_taken_whatever_they_are() -> None:
    listing = Listing("p", ("1.0", "1.1", "1.2", "1.3rc1", "2.0"), {"1.1.1": "bad", "0.9": ""}, "today")
    found = between(listing, "0.9", "1.3rc1")
    assert found.versions == ("0.9", "1.0", "1.1", "1.2", "1.3rc1")
    assert found.left_out == ("yanked: 1.1.1 (bad)",)
    assert between(listing, "1.0.0", "2").versions == ("1.0", "1.1", "1.2", "2.0")
    assert between(listing, "1.0", "2.0", pre=True, yanked=True).versions == (
        "1.0",
        "1.1",
        "1.1.1",
        "1.2",
        "1.3rc1",
        "2.0",
    )


def test_near_holds_the_stack_and_prefers_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Sequence[str], datetime.date, Sequence[str]]] = []

    def compile_versions(
        matrix: Matrix, requirements: Sequence[str], date: datetime.date, preferred: Sequence[str] = ()
    ) -> dict[str, str]:
        asked.append((requirements, date, preferred))
        return {"transformers": "4.52.1"}

    monkeypatch.setattr(candidates, "compile_versions", compile_versions)
    matrix = Matrix("3.11", {}, ("trl",), ("pytest>=8",), (), 3)
    day = datetime.date(2025, 5, 1)
    base = Lock("x", day, "3.11", {"trl": "0.14.0", "transformers": "4.51.3", "tokenizers": "0.21.1"}, "y")
    lock = candidates.near(matrix, "near", {"transformers": "4.52.1"}, base)
    assert dict(lock.packages) == {"transformers": "4.52.1"}
    (question,) = asked
    assert question == (
        ["transformers==4.52.1", "trl==0.14.0", "pytest>=8"],
        day,
        ["trl==0.14.0", "tokenizers==0.21.1"],
    )


def test_a_checkout_is_its_own_layout() -> None:
    assert find_layout() == Layout(ROOT)
    assert state_folder(Layout(ROOT)) == ROOT / "build" / "bisect"


def test_an_installed_package_is_copied_out_of_its_neighbours_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    shutil.copytree(ROOT / "pytest_trlcompat", site / "pytest_trlcompat", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("suites", "fixtures"):
        shutil.copytree(ROOT / name, site / "pytest_trlcompat" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "pytest_trlcompat-0.dist-info").mkdir()
    (site / "pytest_trlcompat-0.dist-info" / "METADATA").write_text("Name: pytest-trlcompat\n")
    (site / "neighbour.py").touch()
    monkeypatch.setattr(layouts, "cache_folder", lambda: tmp_path / "cache")
    layout = find_layout(site / "pytest_trlcompat")
    assert isinstance(layout, InstalledLayout)
    assert find_layout(site / "pytest_trlcompat") == layout
    assert sorted(path.name for path in layout.root.iterdir()) == ["pytest_trlcompat", "pytest_trlcompat-0.dist-info"]
    assert layout.matrix.is_file()
    assert (layout.locks / "trl0.14.0-tf4.48.3.txt").is_file()
    assert (layout.suites / "conftest.py").is_file()
    assert layout.environments == tmp_path / "cache" / "envs"
    assert state_folder(layout) == tmp_path / "cache" / "bisect"


# From Python 3.12 on, forking beside pytest-xdist's threads is warned of; the program itself has none.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@FORKS
def test_a_worker_hands_over_its_result_or_its_exception() -> None:
    workers: Forked[str] = Forked()
    workers.start("good", lambda: 3)
    assert workers.next() == ("good", 3)

    def fails() -> None:
        raise BisectError("no")

    workers.start("bad", fails)
    with pytest.raises(BisectError, match="no"):
        workers.next()
    workers.start("dead", lambda: os._exit(7))
    with pytest.raises(WorkerDied, match="dead ended with exit status 7"):
        workers.next()
    assert workers.running() == set()


@FORKS
def test_a_worker_that_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    def long() -> None:
        subprocess.run(["/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; setsid sleep 300 & sleep 300"], check=True)

    workers: Forked[int] = Forked()
    workers.start(0, long)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    workers.stop([0, 5])
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "it still runs"
    assert workers.running() == set()


@pytest.mark.parametrize("seconds, text", [(40.4, "40 s"), (89, "89 s"), (170, "3 min"), (6000, "1.7 h")])
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_bisecting_imports_neither_the_stack_nor_a_renderer() -> None:
    script = (
        "import sys, pytest_trlcompat.bisect.cli\n"
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'trl', 'jinja2', 'rich', 'pytest'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout == "[]\n"


def test_an_environment_finds_the_installed_package_without_building_it(tmp_path: Path) -> None:
    project, root = tmp_path / "project", tmp_path / "env"
    site_packages = root / "lib" / "python3.11" / "site-packages"
    site_packages.mkdir(parents=True)
    project.mkdir()
    environments._install_project(root, Layout(project))
    assert (site_packages / "trlcompat.pth").read_text() == f"{project}\n"
