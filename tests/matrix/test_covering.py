"""Covering arrays over releases: what may be combined, what is chosen, and that the shipped cells cover their space."""

from __future__ import annotations

import datetime
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from pytest_trlcompat.matrix.cells import PAIRS_TAG, PAIRWISE_TAG, Cell, Excluded, Matrix
from pytest_trlcompat.matrix.covering.array import Array, build
from pytest_trlcompat.matrix.covering.choose import Choice, choose, space_of, written_down
from pytest_trlcompat.matrix.covering.releases import PACKAGES, Listing, Release, allows, minor, read_listing
from pytest_trlcompat.matrix.covering.space import Row, Space, pairs_in, transformers_that_train
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import read_lock
from pytest_trlcompat.matrix.pairwise import pairwise_text, read_pairwise
from pytest_trlcompat.matrix.parsing import read_matrix

CHECKOUT = Layout(Path(__file__).resolve().parents[2])
SHIPPED = read_matrix(CHECKOUT.matrix)
TODAY = datetime.date(2025, 6, 1)


def release(package: str, version: str, month: int, *requires: str) -> Release:
    return Release(package, version, datetime.date(2025, month, 1), requires)


def listing(**more: Sequence[Release]) -> Listing:
    """Three releases of TRL, of which the newest wants a newer Transformers, and two of each other package."""
    releases = {
        "trl": (
            release("trl", "0.1.0", 1, "transformers<4.3"),
            release("trl", "0.1.1", 2),
            release("trl", "0.2.0", 4, "transformers>=4.2", 'peft>=0.2; extra == "peft"', 'peft<0.1; extra == "dev"'),
        ),
        "transformers": tuple(release("transformers", f"4.{n}.0", n) for n in (1, 2, 3)),
        **{
            name: (release(name, "0.1.0", 1), release(name, "0.2.0", 3)) for name in ("accelerate", "deepspeed", "peft")
        },
        **more,
    }
    return Listing(TODAY, {package: tuple(releases[package]) for package in PACKAGES})


@pytest.mark.parametrize(
    ("requires", "version", "allowed"),
    [
        ("peft>=0.2", "0.2.0", True),
        ("peft>=0.2", "0.1.9", False),
        ('peft>=0.2; extra == "peft"', "0.1.9", False),
        ('peft>=0.2; extra == "dev"', "0.1.9", True),
        ('peft>=0.2; python_version < "3.11"', "0.1.9", True),
        ('peft>=0.2; python_version >= "3.11"', "0.1.9", False),
        ('peft>=0.2; sys_platform == "win32"', "0.1.9", True),
        ("accelerate>=9", "0.1.9", True),
    ],
)
def test_what_a_release_declares_admits_another_one_or_not(requires: str, version: str, allowed: bool) -> None:
    assert allows(release("trl", "1.0", 1, requires), release("peft", version, 1), "3.11") is allowed


def test_a_listing_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "releases.toml"
    path.write_text(listing().to_text())
    assert read_listing(path) == listing()
    assert "\"0.1.0\" = { day = 2025-01-01, requires = ['transformers<4.3'] }" in path.read_text()
    for damaged in ("", "day = 1", "[trl]\n'x' = {}"):
        path.write_text(damaged)
        with pytest.raises(
            MatrixError, match=r"releases\.toml: no list of releases .+ make it again with: nox -s pairwise"
        ):
            read_listing(path)


def test_a_pair_is_possible_if_a_whole_row_has_it() -> None:
    space = Space(listing(), "3.11")
    assert (0, "0.1.0", 1, "4.3.0") not in space.declared  # what TRL declares
    assert (0, "0.2.0", 1, "4.1.0") not in space.declared
    assert (0, "0.2.0", 4, "0.1.0") not in space.declared  # trl[peft]
    assert len(space.declared) == 9 - 2 + 3 * (3 * 2) - 1 + 3 * (3 * 2) + 3 * 4
    assert space.possible == space.declared
    lonely = Space(listing(deepspeed=[release("deepspeed", "0.1.0", 1, "accelerate<0.2")]), "3.11")
    assert (2, "0.2.0", 4, "0.1.0") in lonely.declared
    assert (2, "0.2.0", 4, "0.1.0") not in lonely.possible  # no DeepSpeed stands beside both


def test_exclusions_and_transformers_with_which_trl_does_not_train_leave_pairs_out() -> None:
    excluded = Excluded({"transformers": ">=4.2", "peft": "<0.2"}, "reason")
    cells = [Cell({"trl": "0.1.1", "transformers": text}) for text in ("4.1.9", "4.2.0")]
    cells.append(Cell({"trl": "0.2.0", "transformers": "4.3.0"}))
    train = transformers_that_train(cells)
    assert train == {(0, 1): ((4, 1), (4, 2)), (0, 2): ((4, 3), (4, 3))}
    space = Space(listing(), "3.11", (excluded,), train)
    assert space.declared - space.allowed == {
        (1, "4.2.0", 4, "0.1.0"),
        (1, "4.3.0", 4, "0.1.0"),
        (0, "0.1.1", 1, "4.3.0"),
        (0, "0.2.0", 1, "4.2.0"),
    }
    assert space.holds(("0.1.1", "4.2.0", "0.1.0", "0.1.0", "0.2.0"))
    assert not space.holds(("0.1.1", "4.2.0", "0.1.0", "0.1.0", "0.1.0"))


def test_a_release_of_trl_of_which_no_cell_is_known_is_asked_for() -> None:
    space = Space(listing(), "3.11", (), {(0, 1): ((4, 1), (4, 2))})
    with pytest.raises(MatrixError, match="no cell of matrix.toml says with which Transformers trl 0.2.0 trains"):
        _ = space.allowed


def test_an_array_has_every_possible_pair_once_the_measured_ones_are_counted() -> None:
    space = Space(listing(), "3.11")
    measured: list[Row] = [("0.1.0", "4.1.0", "0.1.0", "0.1.0", "0.1.0"), ("0.1.0", "4.3.0", "0.1.0", "0.1.0", "0.1.0")]
    array = build(space, measured)
    rows = [*array.of_their_day, *array.each_release, *array.each_pair]
    assert all(map(space.holds, rows))
    assert pairs_in([measured[0], *rows]) == space.possible
    assert len(rows) == len({*rows, measured[0]}) - 1
    assert len(rows) <= 10  # the pairs of TRL and Transformers alone need 6 more
    assert array == build(space, measured)


def test_a_release_of_trl_without_a_cell_gets_one_with_what_was_newest_on_its_day() -> None:
    array = build(Space(listing(), "3.11"), [("0.1.0", "4.1.0", "0.1.0", "0.1.0", "0.1.0")])
    assert array.of_their_day == (
        ("0.1.1", "4.2.0", "0.1.0", "0.1.0", "0.1.0"),  # February
        ("0.2.0", "4.3.0", "0.2.0", "0.2.0", "0.2.0"),  # April
    )
    assert array.each_release == ()
    early = listing(trl=[release("trl", "0.1.0", 1, "transformers>=4.2")])
    assert build(Space(early, "3.11"), []).of_their_day == (("0.1.0", "4.2.0", "0.1.0", "0.1.0", "0.1.0"),)


def test_every_other_release_without_a_cell_is_in_few_rows_of_the_array() -> None:
    rows: list[Row] = [(trl, "4.1.0", "0.1.0", "0.1.0", "0.1.0") for trl in ("0.1.0", "0.1.1")]
    only = listing(trl=listing().releases["trl"][:2])
    array = build(Space(only, "3.11"), rows)
    assert array.of_their_day == ()
    missing = {(1, "4.2.0"), (1, "4.3.0"), *((column, "0.2.0") for column in (2, 3, 4))}
    assert missing <= {each for row in array.each_release for each in enumerate(row)}
    assert len(array.each_release) == 3  # for five releases
    assert not {*array.each_release} & {*array.each_pair}


def test_releases_that_can_stand_in_no_cell_are_named() -> None:
    alone = listing(accelerate=[release("accelerate", "0.1.0", 1, "deepspeed<0.1"), release("accelerate", "0.2.0", 1)])
    array = build(Space(alone, "3.11"), [])
    assert array.left_out == ("accelerate 0.1.0",)
    assert "0.1.0" not in {row[2] for row in (*array.of_their_day, *array.each_release, *array.each_pair)}


def test_locks_count_as_the_newest_patch_of_their_minor_releases_but_for_trl() -> None:
    matrix = Matrix(
        "3.11", {}, (), (), (), 3, cells=(Cell({"trl": "0.1.0", "transformers": "4.3.0"}, None, ("full",)),)
    )
    found = listing(trl=listing().releases["trl"][:1])
    newer = {"transformers": "4.2.9", "accelerate": "0.1.5", "deepspeed": "0.2.0", "peft": "0.2.1"}
    locks: list[Mapping[str, str]] = [{"trl": "0.1.0", **newer}, {"trl": "0.1.2", **newer}, {"trl": "0.1.0"}]
    choice = choose(matrix, found, locks)
    assert choice.measured == (("0.1.0", "4.2.0", "0.1.0", "0.2.0", "0.2.0"),)


# The file


def test_cells_are_read_as_they_were_written(tmp_path: Path) -> None:
    day = datetime.date(2025, 9, 1)
    path = tmp_path / "pairwise.toml"
    path.write_text(
        pairwise_text(
            ("trl", "peft"), {"each_release": [(day, ("0.22.1", "0.17.1"))], "each_pair": [(day, ("1", "2"))]}, []
        )
    )
    first, second = read_pairwise(path)
    assert (first.id, first.date, first.tags) == ("trl0.22.1-peft0.17.1", day, (PAIRWISE_TAG,))
    assert first.why == "a release that no other cell has"
    assert (second.pins, second.tags) == ({"trl": "1", "peft": "2"}, (PAIRS_TAG,))
    assert read_pairwise(tmp_path / "none.toml") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "not valid TOML: "),
        ("", "no list of cells (KeyError('packages'))"),
        ('packages = ["trl"]\neach_pair = [["1"]]', "no list of cells (ValueError(\"'1' is not a day\"))"),
        (
            'packages = ["trl"]\neach_pair = [[2025-01-01, "x"]]',
            "no list of cells (ValueError(\"'x' is not a version\"))",
        ),
        ('packages = ["trl"]\neach_pair = [[2025-01-01, "1", "2"]]', "no list of cells (ValueError("),
    ],
)
def test_a_damaged_file_of_cells_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pairwise.toml"
    path.write_text(text)
    with pytest.raises(MatrixError) as caught:
        read_pairwise(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert str(caught.value).endswith("make it again with: nox -s pairwise")


# What is shipped


@functools.cache
def shipped() -> Choice:
    """The cells of the file beside the space and the locks from which they were chosen."""
    space = space_of(SHIPPED, read_listing(CHECKOUT.releases))
    again = choose_nothing(space)
    rows = {
        tag: [tuple(cell.pins.values()) for cell in SHIPPED.cells if tag in cell.tags]
        for tag in (PAIRWISE_TAG, PAIRS_TAG)
    }
    days = sum(1 for cell in SHIPPED.cells if cell.why.endswith("newest on its day"))
    once = rows[PAIRWISE_TAG]
    array = Array(tuple(once[:days]), tuple(once[days:]), tuple(rows[PAIRS_TAG]), again.left_out)
    locks = [read_lock(CHECKOUT.locks / f"{cell.id}.txt").packages for cell in written_down(SHIPPED)]
    measured = tuple(row for row in (row_of(space, lock) for lock in locks) if row)
    return Choice(space, array, measured, SHIPPED.settle_days)


def choose_nothing(space: Space) -> Array:
    """Of an array only what follows from the space."""
    usable = {(pair[side], pair[side + 1]) for pair in space.possible for side in (0, 2)}
    every = [(column, version) for column, versions in enumerate(space.columns) for version in versions]
    return Array(
        (), (), (), tuple(f"{PACKAGES[column]} {text}" for column, text in every if (column, text) not in usable)
    )


def row_of(space: Space, lock: Mapping[str, str]) -> Row:
    """Minor releases as their newest patches; empty where the space has none of them."""
    found = [lock["trl"]]
    for column, package in enumerate(PACKAGES[1:], 1):
        found += [text for text in space.columns[column] if minor(text) == minor(lock[package])]
    return tuple(found) if len(found) == len(PACKAGES) else ()


def test_every_release_of_trl_has_a_cell() -> None:
    listed = [each.version for each in shipped().space.listing.releases["trl"]]
    assert {"0.9.6", "0.22.1", "1.9.1", "1.16.0"} <= {*listed}
    in_cells = {cell.pins["trl"] for cell in SHIPPED.cells if PAIRS_TAG not in cell.tags}
    assert set(listed) - in_cells == set()


def test_every_minor_release_of_the_others_has_a_cell_or_cannot_have_one() -> None:
    kept = [read_lock(CHECKOUT.locks / f"{cell.id}.txt").packages for cell in written_down(SHIPPED)]
    kept += [cell.pins for cell in SHIPPED.pairwise(1)]
    for package in PACKAGES[1:]:
        have = {minor(lock[package]) for lock in kept}
        without = [each for each in shipped().space.listing.releases[package] if minor(each.version) not in have]
        assert [str(each) for each in without if str(each) not in shipped().array.left_out] == []


def test_every_possible_pair_has_a_cell_with_strength_2() -> None:
    choice = shipped()
    array = choice.array
    rows = [*choice.measured, *array.of_their_day, *array.each_release, *array.each_pair]
    assert sorted(choice.space.possible - pairs_in(rows)) == []
    assert len(choice.space.possible) > 4000


def test_every_chosen_cell_may_be_installed_by_what_its_releases_declare() -> None:
    space = shipped().space
    for cell in SHIPPED.pairwise(2):
        row = tuple(cell.pins.values())
        assert tuple(cell.pins) == PACKAGES
        assert pairs_in([row]) <= space.declared, cell.id
        assert space.holds(row), cell.id
        assert not (Version(cell.pins["transformers"]) >= Version("5") and Version(cell.pins["peft"]) < Version("0.18"))


def test_every_chosen_cell_is_resolved_some_days_after_its_newest_release() -> None:
    space = shipped().space
    for cell in SHIPPED.pairwise(2):
        newest = max(space.day(column, version) for column, version in enumerate(cell.pins.values()))
        assert cell.date == min(newest + datetime.timedelta(days=3), space.listing.day), cell.id


def test_the_head_of_the_shipped_file_says_how_much_its_cells_cover() -> None:
    """The same numbers as those of the cells that stand there: nobody has edited them by hand."""
    text = CHECKOUT.pairwise.read_text(encoding="utf-8")
    for note in shipped().notes():
        assert f"# {note}\n" in text


def test_the_shipped_exclusions_hold_for_ranges_that_exist() -> None:
    for each in SHIPPED.excluded:
        for package, wanted in each.when.items():
            versions = [release.version for release in shipped().space.listing.releases[package]]
            assert any(version in SpecifierSet(wanted) for version in versions), (package, wanted)


def test_no_chosen_cell_repeats_another() -> None:
    ids = [cell.id for cell in SHIPPED.cells]
    assert len(ids) == len(set(ids))
    assert not {*map(str, itertools.chain(shipped().array.each_release))} & {*map(str, shipped().array.of_their_day)}
