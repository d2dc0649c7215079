"""Torch as an axis: which torch a cell gets, the ids, and that the shipped selection has every supported release."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest
from packaging.version import Version

from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.matrix.torch_axis import (
    DATED,
    cells_with_kept_locks,
    find,
    older_than_supported,
    requested_torch,
    selection,
    with_torch,
)

CHECKOUT = Layout(Path(__file__).resolve().parents[2])
SHIPPED = read_matrix(CHECKOUT.matrix)
RELEASES = {
    "2.4.1": datetime.date(2024, 9, 4),
    "2.6.0": datetime.date(2025, 1, 29),
    "2.13.0": datetime.date(2026, 7, 8),
}
DEFAULT = Cell({"trl": "0.15.2"}, datetime.date(2025, 2, 28), ("default", "full"), "why")
FULL = Cell({"trl": "0.9.6"}, datetime.date(2024, 7, 14), ("full",))
TAGGED = Cell({"trl": "1.9.2"}, datetime.date(2026, 7, 31), ("full", "dated"))
MATRIX = Matrix("3.11", {"torch": "2.13.0"}, ("torch",), (), (), 3, cells=(DEFAULT, FULL, TAGGED), torch=RELEASES)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def dated(cell: Cell, layout: Layout, matrix: Matrix = MATRIX) -> str | None:
    return with_torch(matrix, layout, cell, DATED).pins.get("torch")


@pytest.mark.parametrize(
    ("day", "torch"),
    [
        ("2025-01-28", "2.4.1"),
        ("2025-01-29", "2.6.0"),
        ("2026-07-07", "2.6.0"),
        ("2026-07-08", None),  # the default pin: the very same cell
        ("2024-09-04", "2.4.1"),
        ("2023-01-01", "2.4.1"),  # none older is supported
    ],
)
def test_a_dated_cell_gets_the_newest_torch_of_its_day(day: str, torch: str | None, layout: Layout) -> None:
    assert dated(dataclasses.replace(DEFAULT, date=datetime.date.fromisoformat(day)), layout) == torch


def test_the_oldest_supported_torch_is_known_to_be_newer_than_an_old_cell() -> None:
    assert older_than_supported(MATRIX, FULL)
    assert not older_than_supported(MATRIX, DEFAULT)
    assert not older_than_supported(MATRIX, Cell({"trl": "1"}))


def test_a_cell_keeps_its_day_its_tags_and_its_reason_with_another_torch(layout: Layout) -> None:
    changed = with_torch(MATRIX, layout, DEFAULT, DATED)
    assert changed == Cell({"trl": "0.15.2", "torch": "2.6.0"}, DEFAULT.date, DEFAULT.tags, "why")
    assert changed.id == "trl0.15.2-torch2.6.0"


def test_torch_precedes_the_other_packages_in_an_id(layout: Layout) -> None:
    cell = Cell({"trl": "0.22.2", "transformers": "4.55.4", "deepspeed": "0.17.2"}, datetime.date(2025, 9, 6))
    assert with_torch(MATRIX, layout, cell, "2.8.0").id == "trl0.22.2-tf4.55.4-torch2.8.0-deepspeed0.17.2"


def test_a_pinned_torch_stays_when_dated_and_is_replaced_by_a_named_one(layout: Layout) -> None:
    cell = dataclasses.replace(DEFAULT, pins={"trl": "0.15.2", "torch": "2.4.1"})
    assert dated(cell, layout) == "2.4.1"
    assert with_torch(MATRIX, layout, cell, "2.6.0").id == "trl0.15.2-torch2.6.0"
    assert with_torch(MATRIX, layout, cell, "2.13.0") == DEFAULT


def test_a_cell_without_a_date_has_that_of_its_lock(layout: Layout) -> None:
    cell = dataclasses.replace(DEFAULT, date=None)
    with pytest.raises(MatrixError, match=r"trl0\.15\.2 has no lock, whose date .+: nox -s lock -- trl0\.15\.2$"):
        dated(cell, layout)
    layout.locks.mkdir(parents=True)
    lock = Lock("trl0.15.2", datetime.date(2025, 2, 1), "3.11", {}, "x")
    (layout.locks / "trl0.15.2.txt").write_text(lock.to_text())
    assert with_torch(MATRIX, layout, cell, DATED).date == lock.date
    assert dated(cell, layout) == "2.6.0"


@pytest.mark.parametrize("torch", ["", "newest", "2.x"])
def test_an_invalid_torch_is_refused(torch: str, layout: Layout) -> None:
    with pytest.raises(MatrixError, match=f"^--torch '{torch}' is neither 'dated' nor a version such as 2.6.0"):
        with_torch(MATRIX, layout, DEFAULT, torch)


def test_without_releases_there_are_no_dated_cells(layout: Layout) -> None:
    without = dataclasses.replace(MATRIX, torch={})
    with pytest.raises(MatrixError, match=r"--torch dated needs the releases of torch; list them in \[torch\]"):
        dated(DEFAULT, layout, without)
    assert cells_with_kept_locks(without, layout) == list(MATRIX.cells)


def test_the_dated_selection_adds_the_cells_that_are_tagged_for_it_and_follows_torch(layout: Layout) -> None:
    def ids(**how: object) -> list[str]:
        return [cell.id for cell in selection(MATRIX, layout, **how)]  # type: ignore[arg-type]

    assert ids() == ["trl0.15.2"]
    assert ids(torch=DATED) == ["trl0.15.2-torch2.6.0", "trl1.9.2"]
    assert ids(torch=DATED, full=True) == ["trl0.9.6-torch2.4.1", "trl0.15.2-torch2.6.0", "trl1.9.2"]
    assert ids(torch="2.6.0") == ["trl0.15.2-torch2.6.0"]
    assert ids(torch="2.13.0", full=True) == ["trl0.9.6", "trl0.15.2", "trl1.9.2"]


def test_a_cell_is_found_by_its_id_with_any_torch(layout: Layout) -> None:
    assert find(MATRIX, layout, "trl0.15.2") == DEFAULT
    assert find(MATRIX, layout, "trl0.15.2-torch2.8.0").pins == {"trl": "0.15.2", "torch": "2.8.0"}
    assert find(MATRIX, layout, "trl0.15.2-torch2.13.0") == DEFAULT
    own = dataclasses.replace(DEFAULT, pins={"trl": "0.15.2", "torch": "2.6.0"}, why="its own entry")
    assert find(dataclasses.replace(MATRIX, cells=(DEFAULT, own)), layout, own.id) == own
    for unknown in ("trl0.15.9-torch2.8.0", "trl0.15.2-torch"):
        with pytest.raises(MatrixError, match=f"no cell '{unknown}' in the matrix"):
            find(MATRIX, layout, unknown)


@pytest.mark.parametrize(
    ("arguments", "torch"),
    [
        (["--full"], None),
        (["--", "--torch", "dated"], "dated"),
        (["--torch=2.6.0", "--full"], "2.6.0"),
        (["--torch"], ""),
    ],
)
def test_the_torch_among_the_arguments_of_a_session(arguments: list[str], torch: str | None) -> None:
    assert requested_torch(arguments) == torch


def test_the_shipped_dated_cells_have_every_supported_release_of_torch() -> None:
    cells = selection(SHIPPED, CHECKOUT, torch=DATED)
    assert {SHIPPED.all_pins(cell)["torch"] for cell in cells} == set(SHIPPED.torch)
    assert [f"2.{minor}" for minor in range(4, 16)] == [".".join(torch.split(".")[:2]) for torch in SHIPPED.torch]
    ids = [cell.id for cell in cells]
    assert {"trl0.15.2-tf4.48.3-torch2.6.0", "trl0.26.2-tf4.56.2-torch2.9.1"} <= set(ids)
    defaults = {cell.id for cell in SHIPPED.default()}
    assert defaults <= {f"trl{cell.pins['trl']}-tf{cell.pins['transformers']}" for cell in cells}
    torches = [Version(SHIPPED.all_pins(cell)["torch"]) for cell in cells]
    assert torches == sorted(torches)


def test_no_shipped_dated_cell_has_a_torch_that_came_after_its_day() -> None:
    for cell in selection(SHIPPED, CHECKOUT, torch=DATED):
        torch = cell.pins.get("torch")
        if torch is not None:
            assert cell.date is not None
            assert SHIPPED.torch[torch] <= cell.date, cell.id
