"""By release, end to end, over the made-up registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.bisect.candidates import base as candidates
from pytest_trlcompat.bisect.candidates import releases
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock

from .made_up import OVER_ALL, SILENT, Registry, ask, result, rule

if TYPE_CHECKING:
    pass


def test_the_release_that_broke_it(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    registry.released["transformers"]["4.51.0rc1"] = 109
    registry.yanked["transformers"] = {"4.47.0": "broken wheel"}
    registry.unbuildable = ("transformers==4.50.0",)
    rule(
        registry,
        SILENT.format(condition="at_least('transformers', '4.52')")
        + "\nif held['transformers'].startswith('4.54'): raise KeyError('another')",
    )
    assert ask(registry, *OVER_ALL) == 0
    out = capsys.readouterr().out
    assert "left out: yanked: 4.47.0 (broken wheel)\nleft out: pre-releases: 4.51.0rc1\n" in out
    assert "19 releases of transformers from 4.40.0 to 4.59.0\n" in out
    assert "testing transformers 4.40.0, about 7 steps left\n" in out
    assert "bad is: ValueError: loss is N, not N in " in out
    assert "4.50.0: cannot tell (untestable: Failed to build transformers==4.50.0) [" in out
    culprit = result(registry)["culprit"]
    assert culprit.pop("confidence") > 0.98
    assert culprit == {
        "package": "transformers",
        "last_good": "4.51.0",
        "first_bad": "4.52.0",
        "cannot_tell": [],
        "together_with": [],
        "notes": [],
        "alone": True,
    }
    assert result(registry)["locks"]["moved"]["transformers"] == ["4.51.0", "4.52.0"]
    (search,) = result(registry)["searches"]
    assert search["asked"] == len([step for step in result(registry)["steps"] if step["phase"] == "releases"])
    assert search["bound"] == 4.17
    assert search["asked"] <= 2 + 5 + search["cannot_tell"]


def test_the_release_that_cured_it(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    rule(registry, SILENT.format(condition="not at_least('transformers', '4.45')"))
    arguments = ["--package", "transformers", "--bad", "4.40.0", "--good", "4.59.0", "--find-fix"]
    assert ask(registry, "releases", *arguments, "--with", "trl=0.14.0") == 0
    culprit = result(registry)["culprit"]
    assert (culprit["last_bad"], culprit["first_good"]) == ("4.44.0", "4.45.0")
    assert "transformers 4.45.0 cured `" in capsys.readouterr().out


def test_a_change_beside_the_release_is_told_from_it(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    """accelerate 1.2 came out two days before transformers 4.52.0, which gets the blame until it is held alone."""
    rule(registry, SILENT.format(condition="at_least('accelerate', '1.2')"))
    assert ask(registry, *OVER_ALL) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("accelerate", "1.1", "1.2")
    assert culprit["notes"] == ["it was not transformers: what turned it alone is accelerate, changed beside it"]
    assert "2 packages changed there: transformers, accelerate\n" in capsys.readouterr().out


def test_the_same_command_resolves_and_runs_nothing_again(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, *OVER_ALL) == 0
    first, runs = result(registry), len(registry.runs)
    assert [step["phase"] for step in first["steps"]][-1] == "packages"

    def refuse(*words: object) -> Lock:
        raise AssertionError("it was resolved again")

    monkeypatch.setattr(releases, "lock_for", refuse)
    monkeypatch.setattr(candidates, "compile_versions", refuse)
    assert ask(registry, *OVER_ALL) == 0
    assert result(registry)["culprit"] == first["culprit"]
    assert len(registry.runs) == runs


def test_the_rest_of_the_stack_may_be_held(registry: Registry) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, *OVER_ALL, "--rest", "fixed") == 0
    assert result(registry)["culprit"]["first_bad"] == "4.52.0"
    assert {run["accelerate"] for run in registry.runs} == {"1.3"}
    assert list(result(registry)["locks"]["moved"]) == ["transformers"]


def test_pre_releases_and_yanked_ones_are_taken_when_asked(registry: Registry) -> None:
    registry.released["transformers"]["4.51.1rc1"] = 112
    registry.yanked["transformers"] = {"4.52.0": ""}
    rule(registry, SILENT.format(condition="at_least('transformers', '4.51.1rc1')"))
    assert ask(registry, *OVER_ALL, "--pre", "--yanked") == 0
    culprit = result(registry)["culprit"]
    assert (culprit["last_good"], culprit["first_bad"]) == ("4.51.0", "4.51.1rc1")


def test_what_cannot_tell_between_is_named(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    registry.unbuildable = ("transformers==4.51.0", "transformers==4.52.0")
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, *OVER_ALL) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["last_good"], culprit["first_bad"]) == ("4.50.0", "4.53.0")
    assert culprit["cannot_tell"] == ["4.51.0", "4.52.0"]
    assert "between them 4.51.0, 4.52.0 cannot tell, so it may be one of these" in capsys.readouterr().out


def test_two_releases_without_one_between(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    arguments = ["--package", "transformers", "--good", "4.51.0", "--bad", "4.52.0"]
    assert ask(registry, "releases", *arguments, "--with", "trl=0.14.0") == 0
    assert "no release lies between 4.51.0 and 4.52.0: only these two are tested" in capsys.readouterr().out
    assert result(registry)["culprit"]["first_bad"] == "4.52.0"


@pytest.mark.parametrize(
    "good, bad, options, message",
    [
        (
            "4.59.0",
            "4.40.0",
            [],
            "the bad one comes after the good one, but bad 4.40.0 comes before good 4.59.0; ",
        ),
        ("4.40.0", "4.59.0", ["--find-fix"], "with --find-fix the good one comes after the bad one, but good "),
        ("4.40.0", "4.45.0", [], "both ends are good, so nothing turns between them. transformers 4.40.0, given as "),
        (
            "4.53.0",
            "4.59.0",
            [],
            "both ends are bad, so nothing turns between them. transformers 4.53.0, ",
        ),
        ("4.59.0", "4.45.0", ["--find-fix"], "good and bad are swapped. transformers 4.59.0, given as good: bad ("),
        (
            "4.40.5",
            "4.59.0",
            [],
            "transformers 4.40.5 is unknown to the registry (as of 2026-01-01); near it are ",
        ),
        ("4.40.x", "4.59.0", [], "--good 4.40.x: not a version; write for example --good 4.51.3"),
        ("4.40.0", "4.40.0", [], "good and bad are both 4.40.0; there is nothing to search"),
        ("4.46.0", "4.59.0", [], "transformers 4.46.0 cannot tell, so the search has no end to start from."),
        (
            "4.40.0",
            "4.59.0",
            ["--with", "transformers=4.1"],
            "transformers is what is searched; leave ",
        ),
        (
            "4.40.0",
            "4.59.0",
            ["--with", "trl=9"],
            "--with trl=9: No solution found Because there is no version of trl==9",
        ),
        ("4.40.0", "4.59.0", ["--strategy", "fsdp1"], "--strategy chooses among the checks of a suite; "),
        ("4.40.0", "4.59.0", ["--issue", "nothing"], "one of --issue ID, --pytest TEXT and --command TEXT"),
        ("4.40.0", "4.59.0", ["--clone", "trl"], "--clone trl: write PACKAGE=FOLDER"),
        ("4.40.0", "4.59.0", ["--clone", "trl=nowhere"], "there is no such folder; give the folder of a git clone"),
    ],
)
def test_bad_input_is_one_clear_message(
    registry: Registry, capsys: pytest.CaptureFixture[str], good: str, bad: str, options: list[str], message: str
) -> None:
    registry.unbuildable = ("transformers==4.46.0",)
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    arguments = ["--package", "transformers", "--good", good, "--bad", bad]
    assert ask(registry, "releases", *arguments, *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not (registry.folder / "result.json").exists()


def test_without_a_network_nothing_is_blamed_and_the_steps_are_kept(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    registry.reachable = False
    assert ask(registry, *OVER_ALL) == 2
    assert "the releases of transformers could not be listed: no network" in capsys.readouterr().err

    registry.reachable = True
    lock_for, calls = registry.lock_for, []

    def fails_at_the_third(matrix: Matrix, cell: Cell, layout: Layout) -> Lock:
        calls.append(cell)
        registry.reachable = len(calls) != 3
        return lock_for(matrix, cell, layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(releases, "lock_for", fails_at_the_third)
        assert ask(registry, *OVER_ALL) == 2
    err = capsys.readouterr().err
    assert "the package registry cannot be reached and the cache does not do, so nothing is known of it" in err
    assert "run the same command again with a network" in err
    registry.reachable = True
    assert ask(registry, *OVER_ALL) == 0
    steps = result(registry)["steps"]
    assert [step["kept"] for step in steps[:3]] == [True, True, False]


def test_the_report_can_be_pasted(registry: Registry) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, *OVER_ALL, "--report", "report.md") == 0
    text = (registry.folder / "report.md").read_text()
    assert text.startswith("# transformers 4.52.0 broke `")
    assert "| last good, by releases | transformers 4.51.0 |\n" in text
    assert "| first bad, by releases | transformers 4.52.0 |\n" in text
    assert "-transformers==4.51.0\n+transformers==4.52.0\n" in text
    assert "transformers alone turned it" in text
    assert "ValueError: loss is 0.3, not 0.1\n" in text
    assert "\ntrlcompat bisect releases --package transformers --good 4.40.0 --bad 4.59.0 --with trl=0.14.0 " in text
    assert "--json" not in text
    assert "| transformers 4.40.0 | good | exit status 0 |" in text
    for title in ("before", "after"):
        assert f"<details><summary>All versions {title} (Python 3.11, as of 2025-0" in text
