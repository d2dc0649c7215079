"""Room for builds of torch: told before a sweep, made during it from what finished cells held."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from pytest_trlcompat.matrix import disk
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.disk import announcement, make_room
from pytest_trlcompat.matrix.errors import Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.torch_builds import Need

MATRIX = Matrix("3.11", {"torch": "2.13.0"}, ("torch",), (), (), 3)
CELLS = [Cell({"trl": "0.11.4", "torch": "2.4.1"}), Cell({"trl": "0.15.2", "torch": "2.6.0"}), Cell({"trl": "1.9.2"})]
GIGABYTE = 1_000_000_000
LACKING = {"2.4.1": 5 * GIGABYTE, "2.6.0": 3 * GIGABYTE}


def lock(name: str, torch: str = "2.6.0") -> Lock:
    return Lock(name, datetime.date(2025, 2, 28), "3.11", {"trl": name, "torch": torch}, "x")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lacks two builds of torch, and has as many gigabytes free as it is told."""

    def needs(torches: Iterable[str], python: str, layout: Layout) -> list[Need]:
        return [Need(torch, LACKING[torch]) for torch in dict.fromkeys(torches) if torch in LACKING]

    monkeypatch.setattr(disk, "needs", needs)

    def free(gigabytes: float) -> None:
        monkeypatch.setattr(disk, "free", lambda layout: int(gigabytes * GIGABYTE))

    return free


def test_a_sweep_says_what_the_missing_builds_need(machine: Callable[[float], None], layout: Layout) -> None:
    machine(46)
    assert announcement(MATRIX, CELLS, layout) == (
        "not on this machine yet: torch 2.4.1 (5.0 GB), torch 2.6.0 (3.0 GB); "
        "together they need about 8.0 GB of disk, 46.0 GB are free"
    )


def test_where_that_is_not_enough_it_says_what_happens_then(machine: Callable[[float], None], layout: Layout) -> None:
    machine(9)  # two gigabytes are for the rest
    told = announcement(MATRIX, CELLS, layout)
    assert told is not None
    assert told.endswith(
        "8.0 GB of disk, 9.0 GB are free; where it runs out, environments of finished cells are removed, "
        "and a cell that still finds no room is left unfinished"
    )


def test_where_nothing_is_missing_nothing_is_said(
    machine: Callable[[float], None], layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(46)
    assert announcement(MATRIX, CELLS[2:], layout) is None
    monkeypatch.setattr(disk, "_stands", lambda *arguments: True)
    assert announcement(MATRIX, CELLS, layout) is None


def test_what_cannot_be_resolved_is_told_by_its_cell_alone(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(*arguments: object) -> list[Need]:
        raise Untestable("there is no version of torch==9.9.9")

    monkeypatch.setattr(disk, "needs", needs)
    assert announcement(MATRIX, CELLS, layout) is None


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cells whose environments were removed."""
    names: list[str] = []

    def remove(each: Lock, layout: Layout, say: object) -> bool:
        names.append(each.cell_id)
        return each.cell_id != "gone"

    monkeypatch.setattr(disk, "remove", remove)
    monkeypatch.setattr(disk, "drop_unused", lambda layout, say, wanted: None)
    return names


def test_finished_cells_make_room_until_there_is_enough(
    machine: Callable[[float], None], layout: Layout, removed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(0)
    monkeypatch.setattr(disk, "free", lambda layout: (2 + 2 * len(removed)) * GIGABYTE)
    said: list[str] = []
    finished = [lock("gone"), lock("old"), lock("newer"), lock("newest")]
    make_room(lock("next"), layout, finished, [], said.append)
    assert removed == ["gone", "old"]  # 3 GB and the 2 that are kept free
    assert said == ["old: finished, its environment is removed to make room"]


def test_what_later_cells_want_stays(machine: Callable[[float], None], layout: Layout, removed: list[str]) -> None:
    machine(0)
    same_as_next = dataclasses.replace(lock("next"), cell_id="same versions")
    finished = [lock("old"), lock("wanted"), same_as_next]
    make_room(lock("next"), layout, finished, [lock("wanted")], lambda text: None)
    assert removed == ["old"]


def test_where_there_is_room_or_the_environment_stands_nothing_is_removed(
    machine: Callable[[float], None], layout: Layout, removed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(5.1)
    make_room(lock("next"), layout, [lock("old")], [], lambda text: None)
    machine(0)
    monkeypatch.setattr(disk, "standing", lambda lock, layout: object())
    make_room(lock("next"), layout, [lock("old")], [], lambda text: None)
    assert removed == []


def test_the_disk_is_the_one_that_the_environments_will_lie_on(layout: Layout) -> None:
    assert not layout.environments.exists()
    assert disk.free(layout) > 0
