"""Which tests of the suites a sweep runs in which cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.matrix.suite_choice import PARTS, chosen_tests, part_of_cell, parts_of

DEFAULT = [Cell({"trl": f"0.{number}.0"}) for number in (12, 14, 9, 15, 16, 7, 8, 10, 11, 17)]
ROOT = Path(__file__).resolve().parents[2]


def test_an_older_cell_runs_one_part_and_the_newest_all() -> None:
    assert [part_of_cell(cell, DEFAULT) for cell in DEFAULT] == [*PARTS, "part_1", None]
    assert len(PARTS) == 8
    assert chosen_tests(DEFAULT[1], DEFAULT, full=False) == (
        "not on_demand and not vllm and not liger and not images and not every_pair and not not_default "
        "and not only_newest and part_2"
    )
    assert chosen_tests(DEFAULT[-1], DEFAULT, full=False) == (
        "not on_demand and not vllm and not liger and not images and not every_pair and not not_default "
        "and not only_older"
    )


def test_a_full_sweep_and_a_cell_beside_the_default_ones_run_all_parts() -> None:
    assert chosen_tests(DEFAULT[1], DEFAULT, full=True) == "not on_demand and not vllm and not liger and not images"
    assert (
        chosen_tests(Cell({"trl": "0.18.2"}), DEFAULT, full=False)
        == "not on_demand and not vllm and not liger and not images and not every_pair"
    )
    assert part_of_cell(Cell({"trl": "0.18.2"}), []) is None


RANKS = ["ddp", "zero2", "zero3", "zero3-lora", "fsdp1", "fsdp2"]
ONE, OTHER = "strategy-equivalence", "fsdp2-grad-norm"


def test_two_parts_measure_what_runs_in_one_process_or_has_no_label_and_the_later_what_has_ranks() -> None:
    assert parts_of(ONE, "single") == parts_of(ONE, "single-lora") == parts_of(ONE, None) == ("part_1", "part_8")
    assert parts_of(OTHER, "single") == ("part_2", "part_7")
    assert {parts_of(ONE, label) for label in RANKS} == {("part_8",)}
    assert {parts_of(OTHER, label) for label in RANKS} == {("part_7",)}


def test_two_parts_measure_a_known_issue_and_every_label_is_in_one() -> None:
    for issue in known_issues.load().values():
        parts = {label: parts_of(issue.id, label) for label in issue.strategies or (None,)}
        assert all(parts.values())
        assert len({part for each in parts.values() for part in each}) in (1, 2)


@pytest.mark.parametrize("tag", ["vllm", "liger", "images"])
def test_a_cell_with_more_than_the_stack_runs_the_suites_that_need_it_and_no_other_cell_does(tag: str) -> None:
    cell = Cell({"trl": "1.16.0"}, tags=(tag,))
    assert chosen_tests(cell, DEFAULT, full=False) == f"{tag} and not on_demand"


def test_the_default_cells_run_every_part_with_more_than_the_newest_release() -> None:
    default = read_matrix(ROOT / "fixtures" / "matrix.toml").default()
    run = [part_of_cell(cell, default) for cell in default]
    assert [run.count(part) for part in PARTS] == [1] * len(PARTS)
    assert run.count(None) == 1


def test_issues_whose_suites_share_launches_are_measured_in_the_same_parts() -> None:
    folders = [each.parent.name for each in sorted((ROOT / "suites").glob("*/test_*.py"))]
    for folder, own in (
        ("ppo", ("part_1", "part_8")),
        ("adapters", ("part_2", "part_7")),
        ("sharding", ("part_3", "part_6")),
    ):
        assert folder in folders
        assert {parts_of(issue, "single", folder) for issue in (ONE, OTHER)} == {own}
    assert parts_of(ONE, "single", "grpo") == parts_of(ONE, "single")
