"""The end of a run: one screen, the worst first, and nothing that was not predicted hidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from pytest_trlcompat._escaping import printable
from pytest_trlcompat.catalog import evidence
from pytest_trlcompat.catalog.summary import conclusion, screen
from pytest_trlcompat.catalog.summary_parts import CellSummary, Line, sentence
from pytest_trlcompat.catalog.verdict import Record, Verdict

PAGE = "build/compat/compat.html"


def record(issue: str, verdict: str, strategy: str = "single", subject: str = "upstream", **evidence: str) -> Record:
    return Record(issue, subject, strategy, Verdict(verdict), Verdict(verdict), dict(evidence))


OURS = (record("a", "ok", subject="corrected"), record("b", "ok", subject="corrected"))
CELL = CellSummary(
    "trl0.15.2-tf4.48.3",
    "0.15.2",
    (
        record("waste", "wasteful"),
        record("crash", "error", "zero3"),
        record("raises", "broken", "fsdp1"),
        record("raises", "broken", "fsdp2"),
        record("quiet", "silent", "ddp"),
        record("stopped", "blocked", "zero2", blocked_by="raises"),
        record("fine", "ok"),
        *OURS,
    ),
)


def texts(lines: Sequence[Line]) -> list[str]:
    return ["".join(part.text for part in line) for line in lines]


def test_one_cell_is_shown_with_strategies_the_silent_first_and_upstream_is_broken_comes_last() -> None:
    assert texts(screen([CELL], where=PAGE, more="more: --tables")) == [
        "1 cell, 9 verdicts: all as predicted",
        "",
        "trl0.15.2-tf4.48.3                                               corrected: 2 ok",
        "  1 silent, 1 broken, 1 wasteful, 1 error, 1 blocked",
        "  silent   quiet (ddp)",
        "  broken   raises (fsdp1 fsdp2)",
        "  wasteful waste (single)",
        "  error    crash (zero3)",
        "  blocked  stopped (zero2) by raises",
        "",
        "Every verdict and its evidence: build/compat/compat.html; more: --tables",
        "Upstream is broken: 3 known issues affect TRL's own trainers",
        "1 silent, 1 broken, 1 wasteful",
        "1 suite failed with TRL's own trainers, which no known issue explains",
        "1 known issue could not be judged: blocked by others",
        "A test passes where its verdict is the predicted one, also where that is broken.",
        "Corrected trainers: 2 ok",
    ]


def test_verdicts_have_the_style_of_their_kind() -> None:
    styles = {part.text.strip(): part.style for line in screen([CELL], where="") for part in line}
    assert styles["silent"] == "magenta"
    assert styles["broken"] == "red"
    assert styles["all as predicted"] == "bold green"
    assert styles["Upstream is broken: 3 known issues affect TRL's own trainers"] == "bold red"


def wrong(number: int) -> CellSummary:
    surprise = dataclasses.replace(record(f"issue-{number}", "silent"), expected=Verdict.OK)
    return CellSummary(f"cell-{number}", f"{number}", (surprise, *OURS))


def test_what_is_not_as_predicted_comes_first() -> None:
    crash = Record("odd", "upstream", "ddp", Verdict.ERROR, None)
    lines = texts(screen([CELL, wrong(3), CellSummary("other", "1.0.0", (crash,))], where=PAGE))
    assert lines[:4] == [
        "3 cells, 13 verdicts: 2 not as predicted",
        "  cell-3: issue-3, upstream, single: silent, predicted ok",
        "  other: odd, upstream, ddp: error, nothing was predicted",
        "",
    ]


def test_of_too_many_the_first_are_named_and_the_rest_counted_with_where_it_is() -> None:
    lines = texts(screen([wrong(number) for number in range(30)], where=PAGE))
    assert lines[0] == "30 cells, 90 verdicts: 30 not as predicted"
    assert [line.split(":")[0] for line in lines[1:10]] == [f"  cell-{n}" for n in range(9)]
    assert lines[10] == f"  and 21 more, all in {PAGE}"
    assert len(lines) <= 40
    exactly = texts(screen([wrong(number) for number in range(10)], where=PAGE))
    assert sum(line.startswith("  cell-") for line in exactly) == 10


def test_where_nothing_was_measured_nothing_is_as_predicted() -> None:
    untested = CellSummary("one", "1.0.0", (record("a", "untestable"), record("b", "untestable")))
    unbuilt = CellSummary("two", "1.0.0", (), "untestable")
    assert texts(screen([untested], where=PAGE))[0] == "1 cell, 2 verdicts: none could be measured, 2 untestable"
    assert texts(screen([untested, unbuilt], where=PAGE))[0] == (
        "2 cells, 2 verdicts: none could be measured, 2 untestable, 1 cell not finished"
    )
    assert texts(screen([CellSummary("one", "1.0.0", ())], where=PAGE))[0] == "1 cell, 0 verdicts: nothing was measured"
    assert texts(screen([], where=PAGE))[0] == "0 cells, 0 verdicts: nothing was measured"


def test_cells_that_were_not_finished_are_named_with_their_reason() -> None:
    unbuilt = CellSummary("trl9.9.9", "9.9.9", (), "untestable, there is no\nversion of trl==9.9.9" + " at all" * 20)
    lines = texts(screen([unbuilt], where=PAGE))
    assert lines[0] == "1 cell, 0 verdicts: 1 cell not finished"
    assert lines[1].startswith("  not finished  trl9.9.9: untestable, there is no version of trl==9.9.9 at all"[:77])
    assert len(lines[1]) == 80
    assert texts(screen([CELL, unbuilt], where=PAGE))[0] == (
        "2 cells, 9 verdicts: all as predicted, 1 cell not finished"
    )
    many = texts(screen([dataclasses.replace(unbuilt, name=f"cell-{n}") for n in range(5)], where=PAGE))
    assert many[4] == f"  and 2 more, all in {PAGE}"


def test_what_could_not_be_tested_is_counted_by_reason_the_most_frequent_first() -> None:
    reasons = ["no kernel"] * 3 + ["no stream"] * 2 + ["x", "y"]
    untested = [record(f"i{n}", "untestable", reason=reason) for n, reason in enumerate(reasons)]
    ours = record("i0", "untestable", subject="corrected", reason="no kernel")
    lines = texts(screen([CellSummary("cell", "1.0.0", (*untested, ours))], where=""))
    assert lines[-5:-1] == [
        "4 untestable: no kernel",
        "2 untestable: no stream",
        "1 untestable: x",
        "1 untestable for other reasons",
    ]
    assert lines[-1] == "Corrected trainers: 1 untestable"


@pytest.mark.parametrize("number", [1, 2, 9, 60, 126])
def test_the_published_sweep_fits_on_one_screen(number: int) -> None:
    cells = [
        CellSummary(
            cell.id, cell.versions["trl"], [Record(*key, verdict, verdict) for key, verdict in cell.verdicts.items()]
        )
        for cell in evidence.published().cells[-number:]
    ]
    lines = texts(screen(cells, where=PAGE, more="tables of all issues: nox -s report -- --tables"))
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"{number} cell")
    assert any(line.startswith("Upstream is broken: ") for line in lines[-7:])
    if number <= 9:  # each cell is there, with its worst issues
        assert all(any(line.startswith(cell.name) for line in lines) for cell in cells)
        assert sum(line.startswith("  silent ") for line in lines) >= 1


def test_of_many_cells_neighbouring_releases_that_differ_least_share_a_line() -> None:
    def cell(minor: int, *issues: str) -> CellSummary:
        return CellSummary(f"cell-{minor}", f"1.{minor}.0", (*(record(name, "broken") for name in issues), *OURS))

    cells = [cell(0, "a"), cell(1, "a"), cell(2, "a", "b", "c"), cell(2, "a"), cell(3), cell(4)]
    lines = texts(screen(cells, where="", rows=10))
    assert lines == [
        "6 cells, 18 verdicts: all as predicted",
        "",
        "trl             cells  broken  corrected",
        "1.0.0 to 1.2.0      4     1-3  8 ok",
        "1.3.0 to 1.4.0      2       0  4 ok",
        "",
        "Upstream is broken: 3 known issues affect TRL's own trainers",
        "3 broken",
        "A test passes where its verdict is the predicted one, also where that is broken.",
        "Corrected trainers: 12 ok",
    ]


def test_the_conclusion_says_when_the_corrected_trainers_have_a_problem_and_when_nothing_is_wrong() -> None:
    bad = CellSummary("cell", "1.0.0", (record("a", "ok"), record("b", "broken", subject="corrected"), *OURS))
    ((found,), (ours,)) = conclusion([bad])
    assert (found.text, found.style) == ("TRL's own trainers: no problem was found", "bold green")
    assert (ours.text, ours.style) == ("Corrected trainers: 2 ok, 1 broken", "bold red")
    assert conclusion([CellSummary("cell", "1.0.0", OURS)]) == [
        (dataclasses.replace(ours, text="Corrected trainers: 2 ok", style="bold green"),)
    ]
    assert conclusion([CellSummary("cell", "1.0.0", (record("a", "absent"),))]) == []


@pytest.mark.parametrize(
    ("verdicts", "unfinished", "first"),
    [
        (["wasteful"], "", "1 known issue affects TRL's own trainers"),
        (["wasteful", "hang"], "", "Upstream is broken: 2 known issues affect TRL's own trainers"),
        (["error", "ok"], "", "1 suite failed with TRL's own trainers, which no known issue explains"),
        (["blocked", "blocked"], "", "2 known issues could not be judged: blocked by others"),
        (["ok", "untestable"], "", "TRL's own trainers: no problem was found in what was tested"),
        (["ok"], "stopped", "TRL's own trainers: no problem was found in what was tested"),
    ],
)
def test_the_conclusion_claims_no_more_than_was_measured(verdicts: list[str], unfinished: str, first: str) -> None:
    records = tuple(record(f"issue-{number}", verdict) for number, verdict in enumerate(verdicts))
    assert texts(conclusion([CellSummary("cell", "1.0.0", records, unfinished)]))[0] == first


def test_upstream_is_broken_also_where_the_same_issue_wastes_elsewhere() -> None:
    both = (record("a", "wasteful"), record("a", "broken", "ddp"))
    assert texts(conclusion([CellSummary("cell", "1.0.0", both)]))[:2] == [
        "Upstream is broken: 1 known issue affects TRL's own trainers",
        "1 broken, 1 wasteful",
    ]


def test_an_issue_that_blocked_is_named_beside_the_one_that_was_expected_to() -> None:
    found = dataclasses.replace(
        record("a", "blocked"), expected=Verdict.BLOCKED, evidence={"blocked_by": "x", "blocked_by_expected": "y"}
    )
    assert sentence(found) == "a, upstream, single: blocked by x, predicted blocked by y"
    (line,) = (
        line for line in texts(screen([CellSummary("cell", "1.0.0", (found,))], where="")) if "predicted bl" in line
    )
    assert line == "  a, upstream, single: blocked by x, predicted blocked by y"


def test_no_escape_of_a_terminal_gets_through() -> None:
    evil = CellSummary("trl\x1b[2J", "1.0.0", (), "\x1b]0;title\x07\ud800")
    lines = texts(screen([evil], where=""))
    assert not any(ord(letter) < 32 or 0xD800 <= ord(letter) < 0xE000 for line in lines for letter in line)
    assert (
        printable("a\tb\n\x00\x9b\udfff\u2713")
        == "a\tb\n\N{REPLACEMENT CHARACTER}" + "\N{REPLACEMENT CHARACTER}" * 2 + "\u2713"
    )


def test_a_long_name_is_wrapped_and_not_cut_where_the_verdict_is_not_as_predicted() -> None:
    issue = "grpo-fsdp-no-shard-gradients"
    surprise = Record(issue, "upstream", "fsdp1-no_shard", Verdict.SILENT, Verdict.WASTEFUL)
    name = "trl1.16.0-tf5.23.0-torch2.15.0-py3.13"
    lines = texts(screen([CellSummary(name, "1.16.0", (surprise,)), CELL], where=""))
    assert lines[1:3] == [
        f"  {name}: {issue}, upstream,",
        "    fsdp1-no_shard: silent, predicted wasteful",
    ]


def test_with_everything_at_once_it_is_one_screen_all_the_same() -> None:
    reasons = [f"{n} the software accelerator cannot do this, and says so at great length. " * 4 for n in range(5)]
    untested = tuple(record(f"i{n}", "untestable", reason=reason) for n, reason in enumerate(reasons))
    surprise = Record("grpo-fsdp-no-shard-gradients", "upstream", "fsdp1-no_shard", Verdict.SILENT, Verdict.WASTEFUL)
    worst = dataclasses.replace(CELL, name="trl1.16.0-tf5.23.0-torch2.15.0-py3.13")
    every = dataclasses.replace(worst, records=(*worst.records, surprise, *untested))
    unbuilt = [CellSummary(f"trl9.9.{n}", f"9.9.{n}", (), "there is no such version") for n in range(5)]
    lines = texts(screen([*([every] * 12), *unbuilt], where=PAGE))
    assert len(lines) <= 40
    assert any(line.startswith("0.15.2     12 ") for line in lines), "the cells"
    assert sum(" untestable: " in line for line in lines) == 3
    assert lines[0].startswith("17 cells, 180 verdicts: 12 not as predicted, 60 untestable, 5 cells not finished")
