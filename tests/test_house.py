"""The script that counts what git tracks, and that nothing which a build makes is tracked here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.house import GENERATED, House, generated_in, main, measure, tracked
from tests.conftest import GitHistory

ROOT = Path(__file__).resolve().parents[1]

CODE = "# why\nfound = 1  # no comment line\n\n\ndef f(each, row):\n    kept, other = each, row\n    return kept\n"


@pytest.fixture
def clone(tmp_path: Path, git_history: GitHistory) -> Path:
    """A commit with generated pages, and after it one without."""
    root = tmp_path / "clone"
    files = {
        "pytest_trlcompat/a.py": CODE,
        "pytest_trlcompat/catalog/issues/grpo/a.toml": "a\nb\nc\n",
        "pytest_trlcompat/trainers/known.json": "{\n}\n",
        "suites/b.py": "x = 1\n",
        "tests/c.py": "found = 1\n",
        "docs/issues/a.md": "# a\n\nb\n",
        "docs/how-to/new-page.md": "# New\n\n<!-- Made by `a program`; do not edit. -->\n",
        "docs/how-to/written.md": "# Written\n",
        "image.png": "\0\n\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git_history.run(root, "init", "--quiet", "--initial-branch=main")
    git_history.run(root, "add", ".")
    git_history.run(root, "commit", "--quiet", "--message", "before")
    git_history.run(root, "rm", "--quiet", "--cached", "docs/issues/a.md", "docs/how-to/new-page.md")
    git_history.run(root, "rm", "--quiet", "pytest_trlcompat/trainers/known.json")
    git_history.run(root, "commit", "--quiet", "--message", "after")
    return root


def test_files_and_lines_of_a_commit_are_counted(clone: Path) -> None:
    before = dict(tracked(clone, "HEAD~1"))
    assert generated_in(before) == [
        "docs/how-to/new-page.md",
        "docs/issues/a.md",
        "pytest_trlcompat/trainers/known.json",
    ]
    assert measure(before) == House(
        files=9,
        lines=21,
        generated=3,
        generated_lines=8,
        catalogue=3,
        package=7,
        suites=1,
        tests=1,
        placeholders=375.0,  # found, each and kept in 8 lines
        comments=12.5,
    )


def test_what_is_checked_out_counts_as_git_tracks_it(clone: Path) -> None:
    (clone / "docs" / "new.md").write_text("# not added\n")
    files = dict(tracked(clone))
    assert files == dict(tracked(clone, "HEAD"))
    assert measure(files).generated == 0
    (clone / "suites" / "b.py").write_text("x = 1\ny = 2\n")
    assert measure(dict(tracked(clone))).suites == 2
    (clone / "suites" / "b.py").unlink()
    assert measure(dict(tracked(clone))).suites == 0


def test_commits_stand_beside_what_is_checked_out(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["HEAD~1"], clone) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "|  | HEAD~1 | checked out |",
        "| --- | --: | --: |",
        "| tracked files | 9 | 6 |",
        "| tracked lines | 21 | 13 |",
    ]
    assert "| of them generated: files | 3 | 0 |" in lines


def test_a_generated_file_that_is_tracked_is_an_exit_status_of_1(
    clone: Path, capsys: pytest.CaptureFixture[str], git_history: GitHistory
) -> None:
    git_history.run(clone, "add", "--force", "docs/issues/a.md")
    assert main([], clone) == 1
    assert capsys.readouterr().err == "\ntracked, and made by a build: docs/issues/a.md; git rm --cached them\n"


@pytest.mark.parametrize(("revisions", "folder"), [(["nosuch"], "clone"), ([], ".")])
def test_what_git_cannot_say_is_one_clear_error(
    clone: Path, revisions: list[str], folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(clone.parent.parent))
    assert main(revisions, clone.parent / folder) == 2
    assert capsys.readouterr().err.startswith("house: git cannot say what it tracks: fatal: ")


def test_nothing_that_a_build_makes_is_tracked_here_and_git_ignores_it() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    assert generated_in(dict(tracked(ROOT))) == []
    examples = [pattern.replace("*", "x") for pattern in GENERATED if not pattern.startswith("fixtures/")]
    ignored = subprocess.run(["git", "check-ignore", *examples], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ignored.stdout.splitlines() == examples
