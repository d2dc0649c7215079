"""The list of exceptions, held against outcomes in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from .listing import DTYPES, Exemption, Outcome, judge, read_exemptions, table, without_operator

LISTED = Exemption(("empty",), ("float32", "bool"), SpecifierSet(">=2.5"), "numbers differ", "nobody wrote to it")
NUMBERS = "sample 0, values: 1 of 1 numbers differ"


def judged(outcome: Outcome, torch: str = "2.13.0+cpu") -> list[str]:
    return judge([outcome], [LISTED], torch)


def test_equal_and_listed_ones_are_right() -> None:
    assert judged(Outcome("add", "float32")) == []
    assert judged(Outcome("empty", "float32", NUMBERS)) == []


def test_what_differs_has_to_be_listed() -> None:
    assert judged(Outcome("add", "float32", NUMBERS)) == [f"add in float32: {NUMBERS}"]
    assert judged(Outcome("empty", "int64", NUMBERS)) == [f"empty in int64: {NUMBERS}"]
    assert judged(Outcome("empty", "float32", NUMBERS), torch="2.4.1+cu121") == [f"empty in float32: {NUMBERS}"]


def test_what_is_listed_has_to_differ_and_so() -> None:
    assert judged(Outcome("empty", "bool")) == [
        "empty in bool: is listed (nobody wrote to it), and equals the CPU's; take it off the list"
    ]
    assert judged(Outcome("empty", "bool", "values: strides (1,) instead of (2,)")) == [
        "empty in bool: values: strides (1,) instead of (2,), and is listed with another difference: 'numbers differ'"
    ]


def test_nothing_excuses_a_crash() -> None:
    crash = Outcome("empty", "float32", None, "killed by signal 11")
    assert judged(crash) == ["empty in float32: killed by signal 11"]


def test_two_entries_for_one_are_refused() -> None:
    assert judge([Outcome("empty", "bool", NUMBERS)], [LISTED, LISTED], "2.13.0") == [
        "empty in bool: is listed 2 times"
    ]


def test_an_entry_about_no_operator_of_this_torch_is_found() -> None:
    others = [Outcome("add", "float32"), Outcome("empty", "int64")]
    assert without_operator(others, [LISTED], "2.13.0") == ["empty"]
    assert without_operator(others, [LISTED], "2.4.1") == []
    assert without_operator([Outcome("empty", "bool")], [LISTED], "2.13.0") == []


@pytest.mark.parametrize("entry", ["reasn = 'x'", "dtypes = ['float64']", "shows = 'x'\nreason = 'y'\nsince = '2.5'"])
def test_a_misspelt_entry_is_refused(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "exceptions.toml"
    path.write_text(f"[[exception]]\noperators = ['add']\n{entry}\n")
    with pytest.raises(ValueError, match="exceptions.toml: unknown"):
        read_exemptions(path)


def test_the_table_counts_by_dtype() -> None:
    outcomes = [Outcome("a", "bool"), Outcome("b", "bool", NUMBERS), Outcome("c", "bool", None, "over 60 s")]
    lines = table(outcomes, "2.13.0")
    assert lines[2 + DTYPES.index("bool")] == "| 2.13.0 | bool | 3 | 1 | 1 | 1 |"
    assert lines[2] == "| 2.13.0 | float32 | 0 | 0 | 0 | 0 |"
