"""Commits of clones: built by uv from real git histories, resolved with the newest known stack, installed."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.version import Version

from pytest_trlcompat.matrix import commit_wheels, locks
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.environments import ensure
from pytest_trlcompat.matrix.errors import MatrixError, Untestable
from pytest_trlcompat.matrix.locks import Lock, read_lock
from pytest_trlcompat.watch.commits import WatchedCommit, parse_commit
from pytest_trlcompat.watch.known import known_now
from pytest_trlcompat.watch.layout import WatchLayout
from pytest_trlcompat.watch.plan import cell_of_commit

from ..conftest import GitHistory
from .clones import make_clone

DEVELOPED = ("1.1.0.dev0", "transformers>=5.0", "accelerate>=1.0", "pytest; extra == 'dev'")


@pytest.fixture
def clone(git_history: GitHistory, tmp_path: Path) -> Path:
    """Of TRL: a release, one that needs a newer Accelerate, two of the same version, and one that cannot be built."""
    folder = tmp_path / "trl"
    last = ("1.1.0.dev0", "transformers>=5.0", "accelerate>=1.1")
    make_clone(git_history, folder, "trl", ("1.0.0", "transformers>=5.0"), DEVELOPED, last, last, ("broken",))
    git_history.run(folder, "tag", "v1.0.0", "main~4")
    return folder


def built(clone: Path, revision: str, layout: WatchLayout, package: str = "trl") -> WatchedCommit:
    return parse_commit(f"{package}={clone}@{revision}").build("3.11", layout)


def test_a_commit_is_a_version_of_its_own(clone: Path, checkout: WatchLayout) -> None:
    one, other = (built(clone, revision, checkout) for revision in ("main~2", "main~1"))
    assert one.wheel.public == other.wheel.public == "1.1.0.dev0"
    assert one.wheel.version == f"1.1.0.dev0+g{one.commit.sha[:10]}" != other.wheel.version
    assert str(one.release) == f"trl {one.wheel.version}"
    assert one.release.day == datetime.date(2026, 6, 8)


def test_a_commit_is_built_once_and_its_clone_stays_as_it_is(
    clone: Path, checkout: WatchLayout, git_history: GitHistory
) -> None:
    (clone / "code.py").write_text("changed and not committed\n")
    before = git_history.run(clone, "status", "--porcelain")
    first = built(clone, "main~1", checkout)
    written = first.wheel.path.stat().st_mtime_ns
    assert built(clone, "main~1", checkout).wheel.path.stat().st_mtime_ns == written
    assert git_history.run(clone, "status", "--porcelain") == before == " M code.py\n"
    assert len(git_history.run(clone, "worktree", "list").splitlines()) == 1
    left = {path.name for path in checkout.commits.iterdir() if path.is_dir()}
    assert left == {f"trl-{first.commit.sha[:10]}"}


def test_what_is_checked_out_is_meant_where_no_revision_is_named(
    clone: Path, checkout: WatchLayout, git_history: GitHistory
) -> None:
    git_history.run(clone, "checkout", "--quiet", "main~3")
    assert parse_commit(f"trl={clone}").build("3.11", checkout).wheel.requires == DEVELOPED[1:]


def test_the_newest_known_stack_moves_only_where_the_commit_requires_it(
    clone: Path, matrix: Matrix, checkout: WatchLayout
) -> None:
    known = known_now(matrix, checkout)
    stays = cell_of_commit(matrix, checkout, known, built(clone, "main~3", checkout))
    assert (stays.moved, stays.previous) == ((), "1.0.0")
    lock = locks.lock_for(matrix, stays.cell, checkout)
    assert lock.packages == {**known.base.packages, "trl": stays.stack["trl"]}
    assert stays.cell.id == f"trl{stays.stack['trl']}-tf5.0.0"
    assert stays.about == f"trl {stays.stack['trl']} alone"


def test_a_commit_sees_releases_until_the_day_after_it(clone: Path, matrix: Matrix, checkout: WatchLayout) -> None:
    """Accelerate 1.1.0 came out two days after the commit that requires it."""
    with pytest.raises(Untestable, match=r"accelerate"):
        cell_of_commit(matrix, checkout, known_now(matrix, checkout), built(clone, "main~1", checkout))


def test_what_others_require_of_the_package_is_heeded(
    git_history: GitHistory, tmp_path: Path, matrix: Matrix, checkout: WatchLayout
) -> None:
    """TRL 1.0.0 requires Transformers 5."""
    make_clone(git_history, tmp_path / "tf", "transformers", ("4.9.0.dev0", "tokenizers"))
    with pytest.raises(Untestable, match=r"transformers"):
        cell_of_commit(
            matrix, checkout, known_now(matrix, checkout), built(tmp_path / "tf", "main", checkout, "transformers")
        )


def test_the_commit_is_installed_and_not_the_release(clone: Path, checkout: WatchLayout) -> None:
    one, other = (built(clone, revision, checkout) for revision in ("main~2", "main~1"))
    assert [imported(commit, checkout) for commit in (one, other)] == ["1.1.0.dev0 2", "1.1.0.dev0 3"]


def imported(commit: WatchedCommit, layout: WatchLayout) -> str:
    """The version and the number that a commit's package has where its lock is installed."""
    lock = Lock("x", datetime.date(2026, 6, 9), "3.11", {"trl": commit.wheel.version}, "x")
    path = layout.resolved / "x.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lock.to_text())
    environment = ensure(read_lock(path), layout)
    program = "import trl; from importlib import metadata; print(metadata.version('trl'), trl.number)"
    done = subprocess.run([environment.python, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_wheel_that_is_gone_is_said(clone: Path, checkout: WatchLayout) -> None:
    commit = built(clone, "main~1", checkout)
    kept = built(clone, "main~2", checkout)
    commit_wheels.drop_others([kept.wheel], checkout)
    with pytest.raises(Untestable, match="the wheel of this commit is gone"):
        imported(commit, checkout)
    assert imported(kept, checkout) == "1.1.0.dev0 2"


@pytest.mark.parametrize(
    ("revision", "known", "released"),
    [("v1.0.0", ["1.0.0"], True), ("v1.0.0", ["0.9.0"], False), ("main~3", ["1.0.0", "1.1.0"], False)],
)
def test_the_commit_of_a_known_release_is_not_new(
    clone: Path, checkout: WatchLayout, revision: str, known: Iterable[str], released: bool
) -> None:
    assert built(clone, revision, checkout).is_released(map(Version, known)) is released


def test_a_commit_that_cannot_be_built_says_why(clone: Path, checkout: WatchLayout) -> None:
    with pytest.raises(Untestable, match=r"^trl [0-9a-f]{10} \(change 4\) cannot be built: (.|\n)*no version"):
        built(clone, "main", checkout)
    assert [path for path in checkout.commits.iterdir() if path.is_dir()] == []


def test_a_clone_of_another_package_is_refused(clone: Path, checkout: WatchLayout) -> None:
    with pytest.raises(Untestable, match="is one of trl, not of peft"):
        built(clone, "main~1", checkout, "peft")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trl", "write PACKAGE=FOLDER"),
        ("trl=", "write PACKAGE=FOLDER"),
        ("torch={clone}", "the package must be one of transformers, trl"),
        ("numpy={clone}", "the package must be one of transformers, trl"),
        ("trl={clone}/none", "no such folder"),
        ("trl={clone}@v9", "--commit .*unknown revision 'v9'"),
    ],
)
def test_what_makes_no_sense_is_one_message(clone: Path, text: str, message: str) -> None:
    with pytest.raises(MatrixError, match=message):
        parse_commit(text.format(clone=clone))


def test_a_folder_with_an_at_sign_is_a_folder(clone: Path, git_history: GitHistory) -> None:
    moved = clone.rename(clone.with_name("trl@work"))
    assert parse_commit(f"trl={moved}").revision == "HEAD"
    assert parse_commit(f"trl={moved}@main~1").revision == "main~1"


def test_what_a_lock_says_of_a_commit_is_no_option_and_no_address(checkout: WatchLayout) -> None:
    path = checkout.resolved / "x.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    for line in ("trl==1.1+g0123456789 --hash=x", "trl==1.1+../../x", "trl @ file:///x", "trl==1.1+g012"):
        path.write_text(Lock("x", datetime.date(2026, 6, 9), "3.11", {}, "x").to_text() + line + "\n")
        with pytest.raises(MatrixError, match="is not NAME==VERSION"):
            read_lock(path)


def test_metadata_without_a_version_is_no_traceback(
    git_history: GitHistory, tmp_path: Path, checkout: WatchLayout
) -> None:
    make_clone(git_history, tmp_path / "trl2", "trl", ("not-a-version",))
    with pytest.raises(Untestable, match="cannot be built"):
        built(tmp_path / "trl2", "main", checkout)


def test_what_a_killed_build_has_left_is_removed(clone: Path, checkout: WatchLayout, git_history: GitHistory) -> None:
    commit = built(clone, "main~1", checkout)
    ended = subprocess.Popen(["true"])
    ended.wait()
    tree = checkout.commits / f"tree-{commit.commit.sha[:12]}-{ended.pid}"
    git_history.run(clone, "worktree", "add", "--quiet", "--detach", str(tree), commit.commit.sha)
    (checkout.commits / "unfinished-x").mkdir()
    parse_commit(f"trl={clone}").clean_up(checkout)
    commit_wheels.drop_others([commit.wheel], checkout)
    assert {path for path in checkout.commits.iterdir() if path.is_dir()} == {commit.wheel.path.parent}
    assert len(git_history.run(clone, "worktree", "list").splitlines()) == 1
