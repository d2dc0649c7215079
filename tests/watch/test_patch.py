"""The patch: git applies it, and the matrix and the catalogue take what it brings."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix import hashes, locks
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.watch.changes import Change, changes_in
from pytest_trlcompat.watch.index import ask
from pytest_trlcompat.watch.known import known_now, new_releases
from pytest_trlcompat.watch.layout import WatchLayout
from pytest_trlcompat.watch.narrowing import Narrowed
from pytest_trlcompat.watch.patch import make_patch, unified
from pytest_trlcompat.watch.plan import WatchedCell, make_plan

from .made_up import cell_report, record
from .small_index import day
from .test_known import STACK

ENTRY = """\
# A comment that stays.
title = "t"
wrong = "w"
severity = "weights"
upstream = []
suite = "grpo/test_x.py"
cure = ""
prediction = [
    { verdict = "silent", subject = "upstream", when = { trl = ">=0.14" }, why = "because" },
]
"""


def write_catalogue(folder: Path) -> Path:
    """A catalogue of one issue; returns its file."""
    path = folder / "grpo" / "grpo-x.toml"
    path.parent.mkdir(parents=True)
    path.write_text(ENTRY)
    (folder / "absent.toml").write_text("schema = 1\n")
    return path


@pytest.fixture
def repository(checkout: WatchLayout) -> WatchLayout:
    """The small checkout with a catalogue and hashes, in git."""
    write_catalogue(checkout.catalog)
    lock = next(checkout.locks.glob("*.txt"))
    hashes.renew({"3.11": set(locks.read_lock(lock).requirements)}, Layout(checkout.root))
    (checkout.root / ".gitignore").write_text("build\n")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        git(checkout.root, *words)
    return checkout


@pytest.fixture
def plan(matrix: Matrix, repository: WatchLayout) -> list[WatchedCell]:
    known = known_now(matrix, repository)
    new = new_releases(ask(STACK, matrix.python, False).before(day("2026-06-11")), known.versions)
    return make_plan(matrix, repository, known, new)


def git(root: Path, *words: str, stdin: str | None = None) -> str:
    return subprocess.run(["git", *words], cwd=root, input=stdin, capture_output=True, text=True, check=True).stdout


def cured(plan: list[WatchedCell]) -> Change:
    """TRL 1.1.0 alone has cured grpo-x."""
    alone = next(each for each in plan if each.release is not None and each.release.package == "trl")
    (change,) = changes_in(plan, {alone.cell.id: cell_report(alone, record("ok", "silent", issue="grpo-x"))}, {})
    return change


FOUND = Narrowed("command", "trl 1.1.0 fixed grpo-x", "trl", "1.0.0", "1.1.0")


def test_git_applies_it_and_the_matrix_knows_the_new_cells(
    matrix: Matrix, repository: WatchLayout, plan: list[WatchedCell]
) -> None:
    before = git(repository.root, "status", "--porcelain")
    patch = make_patch(matrix, repository, plan, [(cured(plan), FOUND)])
    assert git(repository.root, "status", "--porcelain") == before == ""  # nothing is changed by making it
    git(repository.root, "apply", "--check", "-", stdin=patch.text)
    git(repository.root, "apply", "-", stdin=patch.text)

    renewed, layout = read_matrix(repository.matrix), Layout(repository.root)
    added = [cell for cell in renewed.cells if cell.id not in {old.id for old in matrix.cells}]
    assert [(cell.id, cell.why) for cell in added] == [
        ("trl1.1.0-tf5.1.0", "the newest release"),
        ("trl1.1.0-tf5.0.0-accelerate1.0.0", "trl 1.1.0 alone, which changed something"),
        ("trl1.0.0-tf5.0.1", "transformers 5.0.1 alone, a patch of an older series"),
    ]
    known = hashes.read(repository.hashes / "3.11.txt")
    for cell in added:
        lock = locks.kept(renewed, cell, layout)
        assert lock is not None, f"{cell.id}: its lock is missing, or of another matrix"
        assert set(lock.requirements) <= set(known)

    issue = known_issues.load.__wrapped__(repository.catalog).get_issue("grpo-x")
    found = [issue.predict("upstream", "ddp", {"trl": trl}) for trl in ("1.0.0", "1.1.0")]
    assert [each and each.verdict for each in found] == [Verdict.SILENT, Verdict.OK]
    written = (repository.catalog / "grpo" / "grpo-x.toml").read_text()
    assert written.startswith("# A comment that stays.\n")
    inserted = [line for line in written.splitlines() if line not in ENTRY.splitlines()]
    assert inserted == [
        '    { verdict = "ok", subject = "upstream", when = { trl = ">=1.1.0" }, strategies = ["ddp"], '
        'why = "measured: 1.0.0 and 1.1.0 of trl differ; say why" },'
    ]
    # A cell is no measurement: until a sweep of it is published, its releases stay new.
    index = ask(STACK, "3.11", False).before(day("2026-06-11"))
    still_new = new_releases(index, known_now(renewed, layout).versions)
    assert still_new == new_releases(index, known_now(matrix, layout).versions)
    assert {("trl", "1.1.0"), ("transformers", "5.1.0")} <= {(each.package, each.version) for each in still_new}


def test_without_changes_the_newest_of_all_alone_becomes_a_cell(
    matrix: Matrix, repository: WatchLayout, plan: list[WatchedCell]
) -> None:
    patch = make_patch(matrix, repository, [each for each in plan if "tf5.0.1" not in each.cell.id], [])
    git(repository.root, "apply", "-", stdin=patch.text)
    assert [cell.id for cell in read_matrix(repository.matrix).cells] == ["trl1.0.0-tf5.0.0", "trl1.1.0-tf5.1.0"]
    assert "catalog/issues" not in patch.text


@pytest.mark.parametrize(
    ("narrowed", "reason"),
    [
        (None, "which release changed it was not measured"),
        (Narrowed("command", reason="good is bad"), "which release changed it was not measured"),
        (replace(FOUND, between=2), "of 2 between 1.0.0 and 1.1.0 nothing is known"),
        (Narrowed("command", "2026-06-10 fixed", "", "2026-06-09", "2026-06-10"), "no single package changed it"),
    ],
)
def test_a_boundary_that_was_not_measured_is_not_written(
    matrix: Matrix, repository: WatchLayout, plan: list[WatchedCell], narrowed: Narrowed | None, reason: str
) -> None:
    patch = make_patch(matrix, repository, plan, [(cured(plan), narrowed)])
    assert "catalog/issues" not in patch.text
    (line,) = patch.left_out
    assert reason in line
    assert line.startswith("grpo-x, TRL's own trainer under ddp: ok, predicted silent")


def test_nothing_tested_gives_no_patch(matrix: Matrix, repository: WatchLayout) -> None:
    assert make_patch(matrix, repository, [], []).text == ""


def test_a_file_without_changes_is_no_part_of_it() -> None:
    assert unified("a.txt", "same\n", "same\n") == ""
    assert "new file mode 100644" in unified("a.txt", "", "new\n")
