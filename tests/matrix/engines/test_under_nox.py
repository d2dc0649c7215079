"""``nox -s matrix`` itself, whose cells a fake pytest measures: side by side, with ``--parallel``, and Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.parsing import read_matrix
from tests.launch.processes import wait_until_gone

from .beside import PROJECT, Checkout

SITE = """
import os, sys, traceback

def report(self, arguments=()):
    print("report:", *sorted(f"{{each.id}} {{each.state}}" for each in self.sweep.sidecars()), flush=True)

def replace():
    sys.path[:0] = [{checkout!r}, {project!r}]
    from pathlib import Path
    from pytest_trlcompat.matrix import machine, sessions
    from tests.matrix.engines.beside import Checkout
    Checkout(Path({checkout!r})).replace_environments(setattr)
    machine.Machine.cores = 16.0
    machine.Machine.busy_with_others = lambda self: 0.0
    machine.Machine.free_memory = lambda self: 2**40
    sessions.Project.report = report

if any("nox" in word for word in sys.orig_argv):
    try:
        replace()
    except BaseException:  # Python would go on without it, and nox would build real environments
        traceback.print_exc()
        os._exit(99)
"""
CELLS = read_matrix(PROJECT / "fixtures" / "matrix.toml").default()
NEWEST, FIRST, SECOND = CELLS[0], CELLS[1], CELLS[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("pytest_trlcompat", "fixtures", "suites"):
        (folder / name).symlink_to(PROJECT / name)
    for name in ("noxfile.py", "pyproject.toml"):
        shutil.copy(PROJECT / name, folder)
    site = tmp_path / "site" / "sitecustomize.py"
    site.parent.mkdir()
    site.write_text(SITE.format(checkout=str(folder), project=str(PROJECT)))
    return Checkout(folder)


def start(checkout: Checkout, *arguments: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NOX_", "TRLCOMPAT_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "nox", "--nocolor", *arguments],
        cwd=checkout.root,
        env={**inherited, "PYTHONPATH": str(checkout.root.parent / "site")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def record(name: str) -> list[Record]:
    return [Record("issue-a", "upstream", f"single-{name}", Verdict.OK, Verdict.OK)]


GROUPS = {name: record(name) for name in ("a", "b", "c", "d")}


def test_named_cells_run_side_by_side_and_are_shown_in_their_order(checkout: Checkout) -> None:
    for cell in (FIRST, SECOND):
        checkout.play(cell, GROUPS, meet=2)
    running = start(checkout, "-s", *(f"matrix({cell.id})" for cell in (FIRST, SECOND)))
    printed = running.communicate(timeout=300)[0]
    assert running.returncode == 0, printed
    assert checkout.most_at_a_time() >= 2
    order = [
        f"Running session matrix({FIRST.id})",
        f"{FIRST.id}: what pytest printed",
        f"{FIRST.id}: 4 verdicts in",
        f"Session matrix({FIRST.id}) was successful",
        f"Running session matrix({SECOND.id})",
        f"{SECOND.id}: what pytest printed",
        f"report: {FIRST.id} tested {SECOND.id} tested",
    ]
    lines = [line for line in printed.splitlines() if not line.startswith("[")]
    places = [next(number for number, line in enumerate(lines) if text in line) for text in order]
    assert places == sorted(places), printed
    assert [*(checkout.layout.results / ".running").iterdir(), *(checkout.layout.results / ".places").iterdir()] == []


@pytest.mark.fault(
    "Each session of `nox --parallel 2` has room for sixteen processes.",
    "There are two processes at a time, of all sessions together.",
)
def test_parallel_is_the_most_of_all_sessions_together(checkout: Checkout) -> None:
    for cell in (NEWEST, FIRST, SECOND):
        checkout.play(cell, GROUPS, seconds=0.3)
    running = start(checkout, "-s", *(f"matrix({cell.id})" for cell in (NEWEST, FIRST, SECOND)), "--parallel", "2")
    printed = running.communicate(timeout=300)[0]
    assert running.returncode == 0, printed
    assert checkout.most_at_a_time() <= 2
    for cell in (NEWEST, FIRST, SECOND):
        assert sorted(checkout.groups_of(cell)) == sorted(GROUPS)
    assert list((checkout.layout.results / ".places").iterdir()) == []


@pytest.mark.fault(
    "Ctrl-C in `nox -s matrix`.", "The report of what there is follows, and no process of any cell is left."
)
def test_ctrl_c_ends_with_the_report_and_no_process(checkout: Checkout) -> None:
    for cell in CELLS:
        checkout.play(cell, GROUPS, seconds=300)
    checkout.play(FIRST, GROUPS)
    running = start(checkout, "-s", "matrix")
    deadline = time.monotonic() + 200
    while "ended" not in {what for *_, cell_id, what in checkout.log() if cell_id == FIRST.id} or not any(
        cell_id == NEWEST.id and what in GROUPS for *_, cell_id, what in checkout.log()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(2)  # until the engine has looked
    running.send_signal(signal.SIGINT)
    printed = running.communicate(timeout=100)[0]
    assert running.returncode == 130, printed
    report = next(line for line in printed.splitlines() if line.startswith("report:"))
    assert f"{FIRST.id} tested" in report
    assert f"{NEWEST.id} interrupted" in report
    for _, pid, _, _ in checkout.log():
        wait_until_gone(pid)
