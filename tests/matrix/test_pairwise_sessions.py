"""``--pairwise``: which cells a sweep has with it, in which order, and which of their locks are kept."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest

from pytest_trlcompat.matrix.arguments import parse_arguments, requested_pairwise
from pytest_trlcompat.matrix.cells import PAIRS_TAG, PAIRWISE_TAG, Cell, Matrix
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.matrix.torch_axis import cells_with_kept_locks, selection

from .test_sessions import MATRIX, Stage, stage  # noqa: F401 - the fixture

DAY = datetime.date(2025, 9, 1)
CELLS = (
    Cell({"trl": "0.9.6"}, DAY, ("default", "full")),
    Cell({"trl": "0.22.1"}, DAY, (PAIRWISE_TAG,)),
    Cell({"trl": "0.11.0"}, DAY, (PAIRWISE_TAG,)),
    Cell({"trl": "0.12.0"}, DAY, (PAIRS_TAG,)),
    Cell({"trl": "1.9.2"}, DAY, ("dated",)),
)
RELEASES = {"2.4.1": datetime.date(2024, 9, 4), "2.13.0": datetime.date(2026, 7, 8)}
WITH_CELLS = Matrix("3.11", {"torch": "2.13.0"}, ("torch",), (), (), 3, cells=CELLS, torch=RELEASES)
PAIRWISE = """
packages = ["trl"]
of_their_day = [[2025-09-01, "0.22.1"], [2024-09-22, "0.11.0"]]
each_pair = [[2024-09-22, "0.11.1"]]
"""


@pytest.mark.parametrize(
    ("how", "ids"),
    [
        ({}, ["trl0.9.6"]),
        ({"pairwise": 1}, ["trl0.11.0", "trl0.22.1"]),
        ({"pairwise": 2}, ["trl0.11.0", "trl0.12.0", "trl0.22.1"]),
        ({"pairwise": 1, "full": True}, ["trl0.9.6", "trl0.11.0", "trl0.22.1"]),
        ({"pairwise": 1, "torch": "dated"}, ["trl0.11.0-torch2.4.1", "trl0.22.1-torch2.4.1"]),
    ],
)
def test_the_cells_of_covering_arrays_are_swept_oldest_first(
    how: dict[str, object], ids: list[str], tmp_path: Path
) -> None:
    assert [cell.id for cell in selection(WITH_CELLS, Layout(tmp_path), **how)] == ids  # type: ignore[arg-type]


def test_locks_of_the_pairs_are_not_kept(tmp_path: Path) -> None:
    without_torch = dataclasses.replace(WITH_CELLS, torch={})
    kept = [cell.id for cell in cells_with_kept_locks(without_torch, Layout(tmp_path))]
    assert kept == ["trl0.9.6", "trl0.22.1", "trl0.11.0", "trl1.9.2"]


def test_the_matrix_has_the_cells_of_the_file_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "matrix.toml"
    path.write_text(MATRIX)
    alone = read_matrix(path)
    (tmp_path / "pairwise.toml").write_text(PAIRWISE)
    both = read_matrix(path)
    assert [cell.id for cell in both.cells[len(alone.cells) :]] == ["trl0.22.1", "trl0.11.0", "trl0.11.1"]
    assert (both.default(), both.full()) == (alone.default(), alone.full())
    assert both.cell("trl0.11.1").tags == (PAIRS_TAG,)


def test_a_session_has_each_cell_that_was_chosen(stage: Stage, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "fixtures" / "pairwise.toml").write_text(PAIRWISE)
    stage.project.matrix = read_matrix(tmp_path / "fixtures" / "matrix.toml")
    assert stage.project.cells(["-s", "matrix", "--", "--pairwise"]) == ["trl0.11.0", "trl0.22.1"]
    ids = stage.project.cells(["-s", "matrix", "--", "--pairwise-strength=2"])
    assert ids == ["trl0.11.0", "trl0.11.1", "trl0.22.1"]
    stage.project.matrix_cell("trl0.11.0", ["--pairwise"])
    assert stage.ran == [("trl0.11.0", ["trl0.22.1"])]
    assert stage.announced == [["trl0.11.0", "trl0.22.1"]]
    assert stage.for_pytest == [("-m", "not on_demand and not vllm and not liger and not images and not every_pair")]
    with pytest.raises(
        MatrixError, match="cell does not take --pairwise; for all cells use: nox -s matrix -- --pairwise"
    ):
        stage.project.free_cell(["trl=0.11.0", "--pairwise"])


@pytest.mark.parametrize(
    ("arguments", "strength"),
    [
        ([], 0),
        (["--full"], 0),
        (["--pairwise"], 1),
        (["--pairwise-strength", "1"], 1),
        (["--pairwise-strength=2"], 2),
        (["--pairwise", "--pairwise-strength", "2"], 2),
    ],
)
def test_the_strength_among_the_arguments_of_a_session(arguments: list[str], strength: int) -> None:
    assert requested_pairwise(arguments) == strength
    assert parse_arguments("matrix", arguments).pairwise == strength


@pytest.mark.parametrize("value", ["3", "", "two"])
def test_another_strength_is_refused(value: str) -> None:
    with pytest.raises(
        MatrixError, match=f"--pairwise-strength '{value}' is neither 1, a cell for each release, nor 2"
    ):
        requested_pairwise(["--pairwise-strength", value])
