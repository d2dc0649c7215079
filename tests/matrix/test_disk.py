"""Disk space for builds of torch: reported before a sweep, freed during it from finished cells."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from pytest_trlcompat.matrix import disk
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.disk import announcement, free_space
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
    """A machine that lacks two builds of torch; call it with the gigabytes that are free."""

    def needs(torches: Iterable[str], python: str, layout: Layout) -> list[Need]:
        return [Need(torch, LACKING[torch]) for torch in dict.fromkeys(torches) if torch in LACKING]

    monkeypatch.setattr(disk, "needs", needs)

    def free(gigabytes: float) -> None:
        monkeypatch.setattr(disk, "available", lambda layout: int(gigabytes * GIGABYTE))

    return free


def test_a_sweep_says_what_the_missing_builds_need(machine: Callable[[float], None], layout: Layout) -> None:
    machine(46)
    assert announcement(MATRIX, CELLS, layout) == (
        "not on this machine yet: torch 2.4.1 (5.0 GB), torch 2.6.0 (3.0 GB); "
        "together they need about 8.0 GB of disk space, 46.0 GB are free"
    )


def test_if_space_is_short_it_says_what_happens_then(machine: Callable[[float], None], layout: Layout) -> None:
    machine(9)  # two gigabytes are for the rest
    text = announcement(MATRIX, CELLS, layout)
    assert text is not None
    assert text.endswith(
        "8.0 GB of disk space, 9.0 GB are free; if it runs out, environments of finished cells are removed, "
        "and a cell for which there is still not enough is left unfinished"
    )


def test_if_nothing_is_missing_there_is_no_announcement(
    machine: Callable[[float], None], layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(46)
    assert announcement(MATRIX, CELLS[2:], layout) is None
    monkeypatch.setattr(disk, "_exists", lambda *arguments: True)
    assert announcement(MATRIX, CELLS, layout) is None


def test_an_unresolvable_cell_is_not_announced(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_finished_cells_are_removed_until_there_is_enough_space(
    machine: Callable[[float], None], layout: Layout, removed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(0)
    monkeypatch.setattr(disk, "available", lambda layout: (2 + 2 * len(removed)) * GIGABYTE)
    said: list[str] = []
    finished = [lock("gone"), lock("old"), lock("newer"), lock("newest")]
    free_space(lock("next"), layout, finished, [], said.append)
    assert removed == ["gone", "old"]  # 3 GB, and the 2 GB margin
    assert said == ["old: finished; its environment is removed to free disk space"]


def test_environments_of_later_cells_stay(machine: Callable[[float], None], layout: Layout, removed: list[str]) -> None:
    machine(0)
    same_as_next = dataclasses.replace(lock("next"), cell_id="same versions")
    finished = [lock("old"), lock("wanted"), same_as_next]
    free_space(lock("next"), layout, finished, [lock("wanted")], lambda text: None)
    assert removed == ["old"]


def test_nothing_is_removed_if_there_is_space_or_the_environment_exists(
    machine: Callable[[float], None], layout: Layout, removed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(5.1)
    free_space(lock("next"), layout, [lock("old")], [], lambda text: None)
    machine(0)
    monkeypatch.setattr(disk, "existing", lambda lock, layout: object())
    free_space(lock("next"), layout, [lock("old")], [], lambda text: None)
    assert removed == []


def test_the_disk_is_that_of_the_future_environments(layout: Layout) -> None:
    assert not layout.environments.exists()
    assert disk.available(layout) > 0
