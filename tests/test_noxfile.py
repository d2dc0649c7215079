"""The noxfile: its sessions, and one clear message for each invalid request. Runs nox itself."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat.matrix import environments
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, read_lock
from pytest_trlcompat.matrix.parsing import read_matrix
from tests.copies import copy_with_bytecode
from tests.docs.examples import KINDS

ROOT = Path(__file__).resolve().parents[1]
MATRIX = ROOT / "fixtures" / "matrix.toml"
CELLS = [
    "trl1.16.0-tf5.23.0",
    "trl0.12.2-tf4.46.3",
    "trl0.14.0-tf4.48.3",
    "trl0.14.0-tf4.52.4",
    "trl0.15.2-tf4.48.3",
    "trl0.15.2-tf4.49.0",
    "trl0.17.0-tf4.50.3",
    "trl0.18.2-tf4.52.4",
    "trl1.0.0-tf4.57.6",
]


def nox(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NOX_", "TRLCOMPAT_"))}
    return subprocess.run(
        [sys.executable, "-m", "nox", "--nocolor", *arguments],
        cwd=folder,
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that nox needs, without results and environments."""
    for name in ("pytest_trlcompat", "fixtures", "suites"):
        copy_with_bytecode(ROOT / name, tmp_path / name)
    for name in ("hatch_build.py", "noxfile.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_every_default_cell_is_a_session() -> None:
    done = nox(ROOT, "--list", "--json")
    sessions = {session["session"]: session for session in json.loads(done.stdout)}
    assert [name for name in sessions if name.startswith("matrix(")] == [f"matrix({cell})" for cell in CELLS]
    assert [name for name in sessions if name.startswith("tests(")] == [
        "tests(trl1.16.0-tf5.23.0)",
        "tests(trl0.17.0-tf4.50.3)",
        "tests(unit)",
        "tests(operators)",
    ]
    assert {session["name"] for session in sessions.values()} == {"tests", "matrix"}  # a plain nox runs no other


def test_unit_tests_run_on_other_pythons_when_they_are_named() -> None:
    sessions = json.loads(nox(ROOT, "--list", "--json", "-s", "unit").stdout)
    assert [session["session"] for session in sessions] == ["unit(3.10)", "unit(3.12)", "unit(3.13)"]


def test_a_cell_with_a_python_of_its_own_has_a_session_when_it_is_named() -> None:
    cells = [cell.id for cell in read_matrix(MATRIX).cells if cell.python]
    assert listed("-s", *(f"matrix({cell})" for cell in cells)) == cells
    assert not set(cells) & set(CELLS)


def listed(*arguments: str, **environ: str) -> list[str]:
    """The cells that nox has sessions for."""
    sessions = json.loads(nox(ROOT, "--list", "--json", *arguments, **environ).stdout)
    return [session["session"].removeprefix("matrix(")[:-1] for session in sessions if session["name"] == "matrix"]


def test_the_full_selection_has_a_session_for_every_cell() -> None:
    full = [cell.id for cell in read_matrix(MATRIX).full()]
    assert len(full) > 90
    assert listed("-s", "matrix", "--", "--full", "--issue", "grpo-logits-to-keep") == full


def test_the_cells_of_covering_arrays_have_a_session_each() -> None:
    matrix = read_matrix(MATRIX)
    assert sorted(listed("-s", "matrix", "--", "--pairwise")) == sorted(cell.id for cell in matrix.pairwise(1))
    assert len(listed("-s", "matrix", "--", "--pairwise-strength", "2")) == len(matrix.pairwise(2)) > 1000


@pytest.mark.parametrize("how", ["option", "variable"])
def test_every_other_cell_has_a_session_when_it_is_named(how: str) -> None:
    other = "trl1.7.1-tf4.56.2"
    assert other not in CELLS
    if how == "option":
        assert listed("-s", f"matrix({other})") == [other]
    else:
        assert listed(NOXSESSION=f"matrix({other})") == [other]


def test_the_dated_selection_has_a_session_for_every_torch() -> None:
    dated = listed("-s", "matrix", "--", "--torch", "dated")
    assert "trl0.15.2-tf4.48.3-torch2.6.0" in dated
    assert "trl0.26.2-tf4.56.2-torch2.9.1" in dated
    assert len(dated) == 16
    assert len(listed("-s", "matrix", "--", "--torch=dated", "--full")) == len(read_matrix(MATRIX).full())


def test_any_cell_with_any_torch_has_a_session_when_it_is_named() -> None:
    other = "trl1.7.1-tf4.56.2-torch2.6.0"
    assert listed("-s", f"matrix({other})") == [other]
    with_torch = listed("-s", "matrix", "--", "--torch", "2.6.0")
    assert sorted(with_torch) == sorted(f"{cell}-torch2.6.0" for cell in CELLS)


def test_an_invalid_torch_is_one_clear_message() -> None:
    done = nox(ROOT, "-s", "matrix", "--", "--torch", "newest")
    assert done.returncode != 0
    assert done.stderr.strip() == "nox: --torch 'newest' is neither 'dated' nor a version such as 2.6.0"


def test_the_other_sessions_are_run_by_name() -> None:
    listed = nox(ROOT, "--list").stdout
    assert re.findall(r"^- (\w+) ->", listed, re.MULTILINE) == [
        *("browser", "fuzz", "coverage"),
        *(
            "cell",
            "lock",
            "pairwise",
            "rows",
            "clean",
            "report",
            "bisect",
            "watch",
            "watch_replay",
            "bench",
            "upstream_reports",
            "soak",
            "mutations",
        ),
        *("absences", "upstream_fixes", "upstream_tests", "downstream", "branches"),
        *("points", "fields", "server_releases", "lint", "docs"),
    ]
    assert re.findall(r"^- examples\((\w+)\) ->", listed, re.MULTILINE) == list(KINDS[:3])


def test_listing_prints_no_summary_and_leaves_no_files(checkout: Path) -> None:
    done = nox(checkout, "--list")
    assert (done.returncode, done.stderr) == (0, "")
    assert "no summary" not in done.stderr
    assert not (checkout / "build").exists()
    assert not (checkout / ".nox").exists()


def test_a_malformed_matrix_is_one_clear_message(checkout: Path) -> None:
    (checkout / "fixtures" / "matrix.toml").write_text('[[cell]]\npins = { trl = "0.15.x" }\n')
    done = nox(checkout, "-s", "matrix")
    assert done.returncode != 0
    assert done.stderr.strip() == (
        f"nox: {checkout}/fixtures/matrix.toml: [[cell]] number 1: malformed version '0.15.x' of trl; "
        "write for example 0.15.2"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("trl=0.19.1", "vllm=1"), "unknown package 'vllm' in pins; the stack has torch, transformers, trl, "),
        (("trl=latest",), "malformed version 'latest' of trl; write for example 0.15.2"),
        ((), "a cell needs at least one pin, for example trl=0.19.1"),
        (("trl0.14.0-tf4.48",), "no cell 'trl0.14.0-tf4.48' in the matrix; similar ones are: trl0.14.0-tf4.48.3, "),
        (("trl=0.19.1", "--full"), "cell does not take --full; for all cells use: nox -s matrix -- --full"),
        (
            ("trl=0.19.1", "--issue", "grpo"),
            "--issue: unknown issue 'grpo'; known are conformance-distillation, conformance-dpo, ",
        ),
        (("trl=0.19.1", "--date", "soon"), "bad date 'soon'; write a day, for example 2025-02-28"),
        (
            ("trl=0.19.1", "--dat", "2025-01-01"),
            "unrecognized arguments: --dat 2025-01-01\nusage: nox -s cell -- PACKAGE=",
        ),
    ],
)
def test_an_invalid_cell_is_one_clear_message(checkout: Path, arguments: tuple[str, ...], message: str) -> None:
    done = nox(checkout, "-s", "cell", "--", *arguments)
    assert done.returncode != 0
    assert f"Session cell aborted: {message}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (checkout / "build").exists()


def test_an_unknown_version_is_untestable_with_the_resolvers_reason_and_ends_with_a_summary(checkout: Path) -> None:
    done = nox(checkout, "-s", "cell", "--", "trl=9.9.9", "transformers=4.53.3")
    assert done.returncode != 0
    assert "trl9.9.9-tf4.53.3 is untestable: No solution found when resolving dependencies" in done.stderr
    assert "there is no version of trl==9.9.9" in done.stderr
    assert "Traceback" not in done.stderr
    assert "1 cell, 0 verdicts: 1 cell not finished" in done.stdout
    assert "not finished  trl9.9.9-tf4.53.3: untestable, No solution found" in done.stdout
    (cell,) = json.loads((checkout / "build" / "compat" / "compat.json").read_text())["cells"]
    assert (cell["state"], cell["verdicts"]) == ("untestable", [])
    assert "there is no version of trl==9.9.9" in cell["reason"]


def test_without_network_and_cache_the_sweep_continues_and_gives_the_reason(checkout: Path, tmp_path: Path) -> None:
    """Also under --parallel, where every session runs in its own process."""
    document = (checkout / "fixtures" / "matrix.toml").read_text()
    head, *cells = document.split("[[cell]]")
    (checkout / "fixtures" / "matrix.toml").write_text("[[cell]]".join([head, *cells[:2]]))
    arguments = ["-s", "matrix", "--parallel", "2", "--", "--full"]
    done = nox(checkout, *arguments, UV_OFFLINE="1", UV_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode != 0
    for cell in CELLS[:2]:
        assert f"{cell} is untestable: " in done.stdout
        sidecar = json.loads((checkout / "build" / "compat" / f"{cell}.cell.json").read_text())
        assert sidecar["state"] == "untestable"
        assert "cache" in sidecar["reason"] or "offline" in sidecar["reason"].lower()
    assert "Traceback" not in done.stdout + done.stderr


def test_only_locks_that_belong_to_no_cell_are_removed(checkout: Path, tmp_path: Path) -> None:
    kept = checkout / "fixtures" / "locks" / f"{CELLS[0]}.txt"
    stray = kept.with_name("trl0.0.1.txt")
    before = kept.read_text()
    shutil.copy(kept, stray)
    done = nox(checkout, "-s", "lock", "--", "--missing", UV_OFFLINE="1", UV_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    stray_line, source_line = done.stdout.splitlines()
    assert stray_line == "trl0.0.1: not a cell of the matrix, its lock is removed"
    assert re.fullmatch(r"deepspeed: \d+ releases would be built from source; everything else is a wheel", source_line)
    assert not stray.exists()
    assert kept.read_text() == before


def test_cleaning_keeps_the_environments_of_all_locks(checkout: Path) -> None:
    locked = read_lock(checkout / "fixtures" / "locks" / f"{CELLS[0]}.txt")
    resolved = dataclasses.replace(locked, packages={"trl": "0.0.1"})
    layout = Layout(checkout)
    layout.resolved.mkdir(parents=True)
    (layout.resolved / "trl0.0.1.txt").write_text(resolved.to_text())
    kept = [environment_name(lock) for lock in (locked, resolved)]
    for name in (*kept, "cell-0", "report-0"):
        (layout.environments / name).mkdir(parents=True)
    done = nox(checkout, "-s", "clean")
    assert (done.returncode, done.stdout) == (0, "cell-0: belongs to no lock, removed\n"), done.stderr
    assert {path.name for path in layout.environments.iterdir() if path.is_dir()} == {*kept, "report-0"}


def environment_name(lock: Lock) -> str:
    """The folder of a lock's environment."""
    return environments._root(lock, Layout(ROOT)).name


def test_nothing_to_report_is_one_clear_message(checkout: Path) -> None:
    done = nox(checkout, "-s", "report")
    assert done.returncode != 0
    assert "build/compat: no cell has left results there; run one with: nox -s matrix" in done.stderr
    assert "Traceback" not in done.stderr
