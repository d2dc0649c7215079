"""What a cell reads ahead: its own modules, and those of the cell that begins next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.matrix import job as room
from pytest_trlcompat.matrix import process
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.sweep import Sweep

from .made_up import CELL, OK, Stage


def test_modules_are_read_ahead_of_pytest_and_shared_after_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []
    for name in ("read_ahead", "share_modules"):
        monkeypatch.setattr(Environment, name, lambda environment, name=name: started.append((name, len(stage.calls))))
    stage.play(OK)
    stage.run()
    assert started == [("read_ahead", 0), ("share_modules", 1)]


@pytest.mark.parametrize(
    ("begun", "built", "read"), [([], [2, 3], 2), ([2], [2, 3], 3), ([], [3], None), ([2, 3], [2, 3], None)]
)
def test_the_next_cells_environment_is_read_ahead_meanwhile(
    begun: Sequence[int], built: Sequence[int], read: int | None, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = {number: Cell({"trl": f"0.{number}.0"}) for number in (2, 3)}
    monkeypatch.setattr(room, "kept", lambda matrix, cell, layout: cell)
    monkeypatch.setattr(
        room,
        "standing",
        lambda lock, layout: next((Environment(stage.root / str(n)) for n in built if cells[n] == lock), None),
    )
    seen: list[tuple[Any, int]] = []

    @contextlib.contextmanager
    def beside(command: list[str], cwd: Path) -> Iterator[None]:
        seen.append((command, len(stage.calls)))
        yield
        seen.append(("ended", len(stage.calls)))

    monkeypatch.setattr(process, "beside", beside)
    for number in begun:
        Sweep(Layout(stage.root), {Sweep.VARIABLE: "first"}).under_way(cells[number].id)
    stage.play(OK)
    stage.run(following=tuple(cells.values()))
    reading = Environment(stage.root / str(read)).read_ahead_command()
    assert seen == ([(reading, 0), ("ended", 1)] if read else [])


def test_what_is_damaged_of_the_next_cell_does_not_stop_this_one(stage: Stage) -> None:
    following = Cell({"trl": "0.2.0"})
    stage.results.parent.mkdir(parents=True)
    stage.results.with_name(f"{following.id}.cell.json").write_text("torn")
    stage.play(OK)
    assert stage.run(following=[following]).problem is None


def test_a_cell_has_begun_while_it_runs_and_after_it(stage: Stage) -> None:
    sweeps = {name: Sweep(Layout(stage.root), {Sweep.VARIABLE: name}) for name in ("first", "second")}
    assert not sweeps["first"].has_begun(CELL.id)
    sweeps["first"].under_way(CELL.id)
    assert [sweep.has_begun(CELL.id) for sweep in sweeps.values()] == [True, False]
    stage.play(OK)
    stage.run("first")
    assert [sweep.has_begun(CELL.id) for sweep in sweeps.values()] == [True, False]
