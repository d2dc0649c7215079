"""Locks of tool environments: resolved once, renewed by a command, and what continuous integration installs of them."""

from __future__ import annotations

import dataclasses
import datetime
import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_trlcompat.matrix import hashes, locks, sessions, tools
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.hashes import with_hashes
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.matrix.tools import Tool, lock_for, renew

ROOT = Path(__file__).resolve().parents[2]
TOOL = Tool("lint", ("ruff==0.17.6", "mypy>=1.18"), "3.11")


class Resolver:
    """Stands for uv: each time it is asked it knows a newer mypy."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[str, ...], str]] = []

    def __call__(self, matrix: Matrix, requirements: Sequence[str], date: datetime.date) -> dict[str, str]:
        self.asked.append((tuple(requirements), matrix.python))
        return {"mypy": f"2.{len(self.asked)}", "ruff": "0.17.6"}


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    resolver = Resolver()
    monkeypatch.setattr(locks, "compile_versions", resolver)
    return resolver


@pytest.fixture
def matrix() -> Matrix:
    return read_matrix(ROOT / "fixtures" / "matrix.toml")


def test_what_is_not_in_the_repository_is_resolved_once(resolver: Resolver, matrix: Matrix, tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    first = lock_for(TOOL, matrix, layout)
    assert lock_for(TOOL, matrix, layout) == first
    assert (first.kind, first.cell_id, dict(first.packages)["mypy"]) == ("lint", "lint-3.11", "2.1")
    other = lock_for(dataclasses.replace(TOOL, python="3.12"), matrix, layout)
    assert resolver.asked == [(TOOL.requirements, "3.11"), (TOOL.requirements, "3.12")]
    assert dict(other.packages)["mypy"] == "2.2"
    assert sorted(lock.cell_id for lock in tools.known(layout)) == ["lint-3.11", "lint-3.12"]


def test_the_lock_of_the_repository_counts_until_the_requirements_change(
    resolver: Resolver, matrix: Matrix, tmp_path: Path
) -> None:
    layout = Layout(tmp_path)
    kept = renew(TOOL, matrix, layout)
    assert lock_for(TOOL, matrix, layout) == kept
    assert len(resolver.asked) == 1
    changed = dataclasses.replace(TOOL, requirements=("ruff==0.18.0", "mypy>=1.18"))
    assert tools.kept(changed, layout) is None
    assert lock_for(changed, matrix, layout).request != kept.request
    assert lock_for(TOOL, matrix, layout) == kept
    assert len(resolver.asked) == 2


def test_locks_are_renewed_by_a_command(resolver: Resolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(tmp_path)
    layout.matrix.parent.mkdir(parents=True)
    layout.matrix.write_text((ROOT / "fixtures" / "matrix.toml").read_text())
    monkeypatch.setattr(hashes, "ask", lambda lines, python, **_: dict.fromkeys(lines, ("0" * 64,)))
    said: list[str] = []
    project = sessions.Project(tmp_path, said.append)
    runner = Tool("nox", ("nox", "uv"), "3.11")
    layout.tool_locks.mkdir(parents=True)
    (layout.tool_locks / "old-3.11.txt").write_text("")
    project.renew_locks(["--tools"], [TOOL, runner])
    assert sorted(path.name for path in layout.tool_locks.iterdir()) == ["lint-3.11.txt", "nox-3.11.txt"]
    today = datetime.datetime.now(datetime.timezone.utc).date()
    assert said[:3] == [
        f"lint-3.11: 2 packages as of {today}",
        f"nox-3.11: 2 packages as of {today}",
        "old-3.11: not a tool of the noxfile, its lock is removed",
    ]
    zeros = "0" * 64
    assert layout.runner.read_text().splitlines()[1:] == [
        f"mypy==2.2 --hash=sha256:{zeros}",
        f"ruff==0.17.6 --hash=sha256:{zeros}",
    ]
    project.renew_locks(["--tools", "--missing"], [TOOL, runner])
    assert len(resolver.asked) == 2
    project.renew_locks(["--tools"], [TOOL, runner])
    assert len(resolver.asked) == 4
    with pytest.raises(MatrixError, match="--tools renews the locks of tools alone"):
        project.renew_locks(["--tools", "trl0.17.0-tf4.50.3"], [TOOL])


def test_each_tool_of_the_noxfile_has_a_lock_with_hashes() -> None:
    noxfile = runpy.run_path(str(ROOT / "noxfile.py"))
    layout = Layout(ROOT)
    known = noxfile["known_tools"]()
    assert len(known) > 20
    assert {"unit-3.10", "unit-3.13", "lint-3.11", "docs-3.11", "nox-3.11", "report-3.11"} <= {
        tool.id for tool in known
    }
    outdated = [tool.id for tool in known if tools.kept(tool, layout) is None]
    assert outdated == [], "renew them: nox -s lock -- --tools --missing"
    assert tools.strays(known, layout) == []
    for tool in known:
        lock = tools.kept(tool, layout)
        assert lock is not None
        assert lock.packages
        in_repository = hashes.read(layout.hashes / f"{tool.python}.txt")
        assert [line for line in lock.releases if line not in in_repository] == [], tool.id


def test_what_continuous_integration_installs_is_the_lock_of_nox() -> None:
    layout = Layout(ROOT)
    lock = next(lock for lock in tools.known(layout) if lock.kind == tools.RUNNER)
    assert {"nox", "uv"} <= set(lock.packages)
    assert layout.runner.read_text().splitlines()[1:] == with_hashes(lock.releases, lock.python, layout)
    assert layout.runner.read_text() == tools.runner_text(lock, layout)
