"""From releases and days to the commits of a clone, end to end, with a fake registry."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.bisect.candidates import commits

from .fakes import ALL_DAYS, ALL_RELEASES, FAIL_IF, FakeRegistry, read_result, run_bisect, write_check

if TYPE_CHECKING:
    from tests.conftest import GitHistory


def make_clone(git_history: GitHistory, folder: Path, count: int, tags: Mapping[str, int]) -> list[str]:
    shas = git_history.make(folder, [{"number": number} for number in range(count)])
    for tag, number in tags.items():
        git_history.run(folder, "tag", tag, shas[number])
    return shas


def install(arguments: Sequence[str]) -> str:
    """What uv would do with a commit's files."""
    shutil.copytree(arguments[-1], arguments[arguments.index("--target") + 1])
    return ""


def test_one_command_narrows_two_days_down_to_the_commit(
    registry: FakeRegistry, git_history: GitHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shas = make_clone(git_history, registry.folder / "clone", 30, {"v4.51.0": 3, "v4.52.0": 27})
    monkeypatch.setattr(commits, "uv_cached_first", install)
    write_check(
        registry,
        "import builtins\nif commit == 20: raise ImportError('half a refactoring here')\n"
        + FAIL_IF.format(condition="commit >= 18 if commit is not None else at_least('transformers', '4.52')"),
    )
    assert run_bisect(registry, *ALL_DAYS, "--clone", "transformers=clone") == 0
    culprit = read_result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("transformers", "4.51.0", "4.52.0")
    assert culprit["commits"]["last_good"] == shas[17]
    assert culprit["commits"]["first_bad"] == shas[18]
    assert read_result(registry)["verdict"].startswith(f"transformers {shas[18][:10]} (change 18) broke")
    assert [search["phase"] for search in read_result(registry)["searches"]] == ["days", "commits"]


@pytest.mark.parametrize("held", [(), ("--with", "accelerate=1.3", "trl=0.14.0")])
def test_commits_of_a_package_are_installed_over_one_environment(
    registry: FakeRegistry, git_history: GitHistory, monkeypatch: pytest.MonkeyPatch, held: tuple[str, ...]
) -> None:
    """Held versions may be newer than the commits, which are of January."""
    shas = make_clone(git_history, registry.folder / "clone", 12, {})
    monkeypatch.setattr(commits, "uv_cached_first", install)
    write_check(registry, FAIL_IF.format(condition="commit >= 7"))
    arguments = ["--package", "transformers", "--clone", "clone", "--good", shas[0], "--bad", shas[-1]]
    assert run_bisect(registry, "commits", *arguments, *held) == 0
    culprit = read_result(registry)["culprit"]
    assert (culprit["package"], culprit["first_bad"]) == ("transformers", shas[7])
    assert {run["accelerate"] for run in registry.runs} == ({"1.3"} if held else {"1.0"})
    assert len([path for path in (registry.folder / "envs").iterdir() if path.is_dir()]) == 1


def test_the_release_is_still_named_when_the_clone_lacks_its_tags(
    registry: FakeRegistry, git_history: GitHistory, capsys: pytest.CaptureFixture[str]
) -> None:
    make_clone(git_history, registry.folder / "clone", 5, {})
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.52')"))
    assert run_bisect(registry, *ALL_RELEASES, "--clone", "transformers=clone") == 0
    culprit = read_result(registry)["culprit"]
    assert culprit["first_bad"] == "4.52.0"
    (note,) = culprit["notes"]
    assert note.startswith("the commit was not found: --clone ")
    assert "no tag for release 4.51.0, such as v4.51.0; fetch the tags: git fetch --tags" in note
