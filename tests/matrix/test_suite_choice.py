"""Which tests of the suites a sweep runs in which cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat.conformance import rows
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.matrix.suite_choice import chosen_tests, parts_in

DEFAULT = [Cell({"trl": f"0.{number}.0"}) for number in (12, 14, 9, 15, 16, 17)]
ROOT = Path(__file__).resolve().parents[2]


def test_an_older_cell_tries_one_part_of_the_rows_and_the_newest_all() -> None:
    assert [parts_in(cell, DEFAULT) for cell in DEFAULT] == [
        *(("rows_1",), ("rows_2",), ("rows_3",), ("rows_4",), ("rows_1",)),
        ("rows_1", "rows_2", "rows_3", "rows_4"),
    ]
    assert chosen_tests(DEFAULT[1], DEFAULT, full=False) == (
        "not on_demand and not vllm and not liger and not every_pair and not rows_1 and not rows_3 and not rows_4"
    )
    assert (
        chosen_tests(DEFAULT[-1], DEFAULT, full=False) == "not on_demand and not vllm and not liger and not every_pair"
    )


def test_a_full_sweep_and_a_cell_beside_the_default_ones_try_all_rows() -> None:
    assert chosen_tests(DEFAULT[1], DEFAULT, full=True) == "not on_demand and not vllm and not liger"
    assert (
        chosen_tests(Cell({"trl": "0.18.2"}), DEFAULT, full=False)
        == "not on_demand and not vllm and not liger and not every_pair"
    )
    assert parts_in(Cell({"trl": "0.18.2"}), []) == rows.PARTS


@pytest.mark.parametrize("tag", ["vllm", "liger"])
def test_a_cell_with_more_than_the_stack_runs_the_suites_that_need_it_and_no_other_cell_does(tag: str) -> None:
    cell = Cell({"trl": "1.16.0"}, tags=(tag,))
    assert chosen_tests(cell, DEFAULT, full=False) == f"{tag} and not on_demand"


def test_the_default_cells_try_every_part_with_more_than_the_newest_release() -> None:
    default = read_matrix(ROOT / "fixtures" / "matrix.toml").default()
    tried = [part for cell in default for part in parts_in(cell, default)]
    assert {part: tried.count(part) for part in rows.PARTS} == dict.fromkeys(rows.PARTS, 3)


def test_rows_of_one_launch_are_of_one_part() -> None:
    for trainer in rows.TRAINERS:
        for label, row in rows.load(trainer).items():
            together = rows.together_with(trainer, label)
            assert row in together
            assert {each.strategy for each in together} == {row.strategy}
            assert {each.needs_liger for each in together} == {row.needs_liger}
            assert {rows.part_of(trainer, each.label) for each in together} == {rows.part_of(trainer, label)}
