"""By release, end to end, with a fake registry."""

from __future__ import annotations

import pytest

from pytest_trlcompat.bisect import candidates
from pytest_trlcompat.bisect.candidates import releases
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock

from .fakes import ALL_RELEASES, FAIL_IF, FakeRegistry, read_result, run_bisect, write_check


def test_the_release_that_broke_it_is_found(registry: FakeRegistry, capsys: pytest.CaptureFixture[str]) -> None:
    registry.released["transformers"]["4.51.0rc1"] = 109
    registry.yanked["transformers"] = {"4.47.0": "broken wheel"}
    registry.unbuildable = ("transformers==4.50.0",)
    write_check(
        registry,
        FAIL_IF.format(condition="at_least('transformers', '4.52')")
        + "\nif held['transformers'].startswith('4.54'): raise KeyError('another')",
    )
    assert run_bisect(registry, *ALL_RELEASES) == 0
    out = capsys.readouterr().out
    assert "left out: yanked: 4.47.0 (broken wheel)\nleft out: pre-releases: 4.51.0rc1\n" in out
    assert "19 releases of transformers from 4.40.0 to 4.59.0\n" in out
    assert "testing transformers 4.40.0, about 7 steps left\n" in out
    assert "bad means: ValueError: loss is N, not N in " in out
    assert "4.50.0: inconclusive (untestable: Failed to build transformers==4.50.0) [" in out
    culprit = read_result(registry)["culprit"]
    assert culprit.pop("confidence") > 0.98
    assert culprit == {
        "package": "transformers",
        "last_good": "4.51.0",
        "first_bad": "4.52.0",
        "inconclusive": [],
        "together_with": [],
        "notes": [],
        "alone": True,
    }
    assert read_result(registry)["schema"] == 2
    assert read_result(registry)["locks"]["moved"]["transformers"] == ["4.51.0", "4.52.0"]
    (search,) = read_result(registry)["searches"]
    assert search["tested"] == len([step for step in read_result(registry)["steps"] if step["phase"] == "releases"])
    assert search["bound"] == 4.17
    assert search["tested"] <= 2 + 5 + search["inconclusive"]


def test_the_release_that_fixed_it_is_found(registry: FakeRegistry, capsys: pytest.CaptureFixture[str]) -> None:
    write_check(registry, FAIL_IF.format(condition="not at_least('transformers', '4.45')"))
    arguments = ["--package", "transformers", "--bad", "4.40.0", "--good", "4.59.0", "--find-fix"]
    assert run_bisect(registry, "releases", *arguments, "--with", "trl=0.14.0") == 0
    culprit = read_result(registry)["culprit"]
    assert (culprit["last_bad"], culprit["first_good"]) == ("4.44.0", "4.45.0")
    assert "transformers 4.45.0 fixed `" in capsys.readouterr().out


def test_a_package_that_changed_with_the_release_is_named_instead(
    registry: FakeRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    """accelerate 1.2 came out two days before transformers 4.52.0, which looks guilty until it is tested alone."""
    write_check(registry, FAIL_IF.format(condition="at_least('accelerate', '1.2')"))
    assert run_bisect(registry, *ALL_RELEASES) == 0
    culprit = read_result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("accelerate", "1.1", "1.2")
    assert culprit["notes"] == [
        "transformers is not the cause: accelerate changed at the same time, and that alone changes the result"
    ]
    assert "2 packages changed between them: transformers, accelerate\n" in capsys.readouterr().out


def test_the_same_command_resolves_and_runs_nothing_again(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.52')"))
    assert run_bisect(registry, *ALL_RELEASES) == 0
    first, runs = read_result(registry), len(registry.runs)
    assert [step["phase"] for step in first["steps"]][-1] == "packages"

    def refuse(*words: object) -> Lock:
        raise AssertionError("it was resolved again")

    monkeypatch.setattr(releases, "lock_for", refuse)
    monkeypatch.setattr(candidates, "compile_versions", refuse)
    assert run_bisect(registry, *ALL_RELEASES) == 0
    assert read_result(registry)["culprit"] == first["culprit"]
    assert len(registry.runs) == runs


def test_the_rest_of_the_stack_may_be_held(registry: FakeRegistry) -> None:
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.52')"))
    assert run_bisect(registry, *ALL_RELEASES, "--rest", "fixed") == 0
    assert read_result(registry)["culprit"]["first_bad"] == "4.52.0"
    assert {run["accelerate"] for run in registry.runs} == {"1.3"}
    assert list(read_result(registry)["locks"]["moved"]) == ["transformers"]


def test_pre_releases_and_yanked_releases_are_included_on_request(registry: FakeRegistry) -> None:
    registry.released["transformers"]["4.51.1rc1"] = 112
    registry.yanked["transformers"] = {"4.52.0": ""}
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.51.1rc1')"))
    assert run_bisect(registry, *ALL_RELEASES, "--pre", "--yanked") == 0
    culprit = read_result(registry)["culprit"]
    assert (culprit["last_good"], culprit["first_bad"]) == ("4.51.0", "4.51.1rc1")


def test_inconclusive_candidates_at_the_change_are_named(
    registry: FakeRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.unbuildable = ("transformers==4.51.0", "transformers==4.52.0")
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.52')"))
    assert run_bisect(registry, *ALL_RELEASES) == 0
    culprit = read_result(registry)["culprit"]
    assert (culprit["last_good"], culprit["first_bad"]) == ("4.50.0", "4.53.0")
    assert culprit["inconclusive"] == ["4.51.0", "4.52.0"]
    assert (
        "; between them 4.51.0, 4.52.0 are inconclusive, so one of these may be the cause; " in capsys.readouterr().out
    )


def test_two_neighbouring_releases_are_both_tested(registry: FakeRegistry, capsys: pytest.CaptureFixture[str]) -> None:
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.52')"))
    arguments = ["--package", "transformers", "--good", "4.51.0", "--bad", "4.52.0"]
    assert run_bisect(registry, "releases", *arguments, "--with", "trl=0.14.0") == 0
    assert "no release between 4.51.0 and 4.52.0: only these two are tested" in capsys.readouterr().out
    assert read_result(registry)["culprit"]["first_bad"] == "4.52.0"


@pytest.mark.parametrize(
    "good, bad, options, message",
    [
        (
            "4.59.0",
            "4.40.0",
            [],
            "bad must be later than good, but bad 4.40.0 is earlier than good 4.59.0; swap them, or add --find-fix ",
        ),
        ("4.40.0", "4.59.0", ["--find-fix"], "with --find-fix good must be later than bad, but good 4.40.0 is "),
        ("4.40.0", "4.45.0", [], "both ends are good, so there is no change to find. transformers 4.40.0 (--good) "),
        (
            "4.53.0",
            "4.59.0",
            [],
            "both ends are bad, so there is no change to find. transformers 4.53.0 (--good) ",
        ),
        ("4.59.0", "4.45.0", ["--find-fix"], "good and bad are swapped. transformers 4.59.0 (--good) is bad ("),
        (
            "4.40.5",
            "4.59.0",
            [],
            "the registry has no transformers 4.40.5 (as of 2026-01-01); its nearest releases are 4.40.0, ",
        ),
        ("4.40.x", "4.59.0", [], "--good 4.40.x: not a version; write for example --good 4.51.3"),
        ("4.40.0", "4.40.0", [], "--good and --bad are both 4.40.0, so there is nothing to search"),
        ("4.46.0", "4.59.0", [], "transformers 4.46.0 is inconclusive, so the search cannot start."),
        (
            "4.40.0",
            "4.59.0",
            ["--with", "transformers=4.1"],
            "the releases of transformers are searched, so it cannot be held; remove it from --with",
        ),
        (
            "4.40.0",
            "4.59.0",
            ["--with", "trl=9"],
            "--with trl=9: No solution found Because there is no version of trl==9",
        ),
        ("4.40.0", "4.59.0", ["--strategy", "fsdp1"], "--strategy chooses among the checks of --issue or --pytest; "),
        (
            "4.40.0",
            "4.59.0",
            ["--issue", "nothing"],
            "exactly one of --issue, --pytest and --command must say what is bad; found --issue and --command",
        ),
        ("4.40.0", "4.59.0", ["--clone", "trl"], "--clone trl: write PACKAGE=FOLDER"),
        ("4.40.0", "4.59.0", ["--clone", "trl=nowhere"], "no such folder; name the folder of a git clone"),
    ],
)
def test_invalid_input_is_refused_with_one_clear_message(
    registry: FakeRegistry, capsys: pytest.CaptureFixture[str], good: str, bad: str, options: list[str], message: str
) -> None:
    registry.unbuildable = ("transformers==4.46.0",)
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.52')"))
    arguments = ["--package", "transformers", "--good", good, "--bad", bad]
    assert run_bisect(registry, "releases", *arguments, *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not (registry.folder / "result.json").exists()


def test_without_a_network_no_candidate_is_judged_and_steps_are_kept(
    registry: FakeRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.52')"))
    registry.reachable = False
    assert run_bisect(registry, *ALL_RELEASES) == 2
    assert "the releases of transformers could not be listed: no network" in capsys.readouterr().err

    registry.reachable = True
    lock_for, calls = registry.lock_for, []

    def fails_at_the_third(matrix: Matrix, cell: Cell, layout: Layout) -> Lock:
        calls.append(cell)
        registry.reachable = len(calls) != 3
        return lock_for(matrix, cell, layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(releases, "lock_for", fails_at_the_third)
        assert run_bisect(registry, *ALL_RELEASES) == 2
    err = capsys.readouterr().err
    assert (
        "the package registry cannot be reached, and the cache lacks what is needed, so this candidate could not" in err
    )
    assert "Every finished step is kept: run the same command again when there is a network." in err
    registry.reachable = True
    assert run_bisect(registry, *ALL_RELEASES) == 0
    steps = read_result(registry)["steps"]
    assert [step["kept"] for step in steps[:3]] == [True, True, False]


def test_the_report_escapes_what_a_failure_prints(registry: FakeRegistry) -> None:
    text = "```\\n<img src=x onerror=alert(1)>\\n````"
    write_check(registry, f"if at_least('transformers', '4.52'): raise ValueError('{text}')")
    assert run_bisect(registry, *ALL_RELEASES, "--report", "report.md") == 0
    report = (registry.folder / "report.md").read_text()
    before, evidence, after = report.split("`````")
    assert evidence.startswith("text\n[command]\n")
    assert "<img" in evidence
    assert "<img" not in before + after


def test_the_report_has_all_that_an_upstream_issue_needs(registry: FakeRegistry) -> None:
    write_check(registry, FAIL_IF.format(condition="at_least('transformers', '4.52')"))
    assert run_bisect(registry, *ALL_RELEASES, "--report", "report.md") == 0
    text = (registry.folder / "report.md").read_text()
    assert text.startswith("# transformers 4.52.0 broke `")
    assert "| last good, by releases | transformers 4.51.0 |\n" in text
    assert "| first bad, by releases | transformers 4.52.0 |\n" in text
    assert "-transformers==4.51.0\n+transformers==4.52.0\n" in text
    assert "Updating transformers alone is enough: the result was the same without the other changes." in text
    assert "ValueError: loss is 0.3, not 0.1\n" in text
    assert "\ntrlcompat bisect releases --package transformers --good 4.40.0 --bad 4.59.0 --with trl=0.14.0 " in text
    assert "--json" not in text
    assert "| transformers 4.40.0 | good | exit status 0 |" in text
    for title in ("before", "after"):
        assert f"<details><summary>All versions {title} (Python 3.11, as of 2025-0" in text
