"""Which cells follow from new releases, resolved by uv against a small index."""

from __future__ import annotations

from pytest_trlcompat.matrix import locks
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.covering.releases import Release
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.locks import read_lock
from pytest_trlcompat.matrix.results import TESTED, Sidecar
from pytest_trlcompat.watch.index import ask
from pytest_trlcompat.watch.known import Known, known_before, known_now, new_releases
from pytest_trlcompat.watch.layout import WatchLayout
from pytest_trlcompat.watch.plan import WatchedCell, as_measured, base_cell, make_plan

from .small_index import day
from .test_known import STACK


def plan(matrix: Matrix, layout: WatchLayout, known: Known, until: str) -> list[WatchedCell]:
    index = ask(STACK, matrix.python, False).before(day(until))
    return make_plan(matrix, layout, known, new_releases(index, known.versions))


def past(matrix: Matrix, since: str) -> Known:
    return known_before(matrix, ask(STACK, matrix.python, False), day(since))


def test_one_new_release_alone_is_the_newest_of_all(matrix: Matrix, checkout: WatchLayout) -> None:
    (only,) = plan(matrix, checkout, known_now(matrix, checkout), "2026-06-06")
    assert only.about == "transformers 5.1.0 alone"
    assert (only.cell.id, only.previous, only.moved) == ("trl1.0.0-tf5.1.0", "5.0.0", ())
    assert only.cell.date == day("2026-06-06")  # the day after it came, whoever asks when


def test_two_new_releases_are_tried_together_and_each_alone(matrix: Matrix, checkout: WatchLayout) -> None:
    found = plan(matrix, checkout, past(matrix, "2026-06-10"), "2026-06-11")
    assert [(each.cell.id, each.about) for each in found] == [
        ("trl1.1.0-tf5.1.0", "the newest of all"),
        ("trl1.1.0-tf5.1.0-accelerate1.0.0", "trl 1.1.0 alone"),
        ("trl1.0.0-tf5.1.0-accelerate1.1.0", "accelerate 1.1.0 alone"),
    ]


def test_what_is_no_part_of_the_stack_stays_as_it_was(matrix: Matrix, checkout: WatchLayout) -> None:
    """tokenizers 0.2.0 and 0.2.1 came out meanwhile: they are not what TRL's release changes."""
    known = known_now(matrix, checkout)
    assert known.base.packages["tokenizers"] == "0.1.0"
    found = {each.about: each for each in plan(matrix, checkout, known, "2026-06-15")}
    alone = found["trl 1.1.0 alone"]
    lock = locks.lock_for(matrix, alone.cell, checkout)
    assert lock.packages == {**known.base.packages, "trl": "1.1.0"}


def test_so_it_does_where_one_release_is_the_newest_of_all(matrix: Matrix, checkout: WatchLayout) -> None:
    """As of its day the resolver alone would take tokenizers 0.2.1."""
    known = past(matrix, "2026-06-11")
    assert known.base.packages["tokenizers"] == "0.1.0"
    late = Release("peft", "0.1.0", day("2026-06-14"))  # nothing else is new: the stack is that of the newest of all
    (only,) = make_plan(matrix, checkout, known, [late])
    assert locks.lock_for(matrix, only.cell, checkout).packages == known.base.packages


def test_what_must_move_moves_and_is_said(matrix: Matrix, checkout: WatchLayout) -> None:
    found = {each.about: each for each in plan(matrix, checkout, past(matrix, "2026-06-10"), "2026-06-21")}
    alone = found["trl 1.2.0 alone"]
    assert alone.moved == ("transformers 5.2.0", "accelerate 1.1.0")
    assert alone.stack["transformers"] == "5.2.0"


def test_a_measured_stack_keeps_its_name_and_is_not_resolved_again(matrix: Matrix, checkout: WatchLayout) -> None:
    (only,) = plan(matrix, checkout, known_now(matrix, checkout), "2026-06-06")
    measured(checkout, only.cell, matrix)
    known = as_measured(checkout, past(matrix, "2026-06-06"))
    assert known.base.cell_id == "trl1.0.0-tf5.1.0"
    assert base_cell(matrix, checkout, known).cell == only.cell


def test_a_name_that_another_stack_was_measured_under_is_not_taken(matrix: Matrix, checkout: WatchLayout) -> None:
    """Yesterday's newest of all had another accelerate and the same two pins."""
    yesterday = base_cell(matrix, checkout, past(matrix, "2026-06-10"))
    assert yesterday.cell.id == "trl1.0.0-tf5.1.0"
    measured(checkout, yesterday.cell, matrix)
    known = past(matrix, "2026-06-12")
    stack = {**known.base.packages, "trl": "1.0.0"}
    today = base_cell(matrix, checkout, Known(known.versions, locks.Lock("", known.base.date, "3.11", stack, "")))
    assert today.cell.id == "trl1.0.0-tf5.1.0-accelerate1.1.0"


def test_a_release_that_cannot_be_resolved_is_still_a_cell(matrix: Matrix, checkout: WatchLayout) -> None:
    """Its run says why it cannot."""
    known = known_now(matrix, checkout)
    found = make_plan(matrix, checkout, known, [Release("peft", "9.9.9", day("2026-06-06"))])
    alone = next(each for each in found if each.release is not None)
    assert alone.cell.id == "trl1.0.0-tf5.0.0-peft9.9.9"
    assert alone.stack == {}


def measured(layout: WatchLayout, cell: Cell, matrix: Matrix) -> None:
    lock = read_lock(layout.resolved / f"{cell.id}.txt")
    sidecar = Sidecar(cell.id, matrix.all_pins(cell), TESTED, "s", lock.packages, lock.date.isoformat())
    write_whole(layout.results / f"{cell.id}.cell.json", sidecar.to_json())
