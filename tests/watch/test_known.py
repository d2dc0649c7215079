"""What is new: against the matrix, and against a past."""

from __future__ import annotations

import datetime

import pytest
from packaging.version import Version

from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.covering.releases import Release
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.watch.index import Index, ask
from pytest_trlcompat.watch.known import known_before, known_now, new_releases
from pytest_trlcompat.watch.layout import WatchLayout

from .small_index import day

STACK = ("torch", "transformers", "trl", "accelerate", "peft", "datasets")


def index(**days: str) -> Index:
    """Of transformers: version (with underscores) to its day."""
    found = [Release("transformers", name[1:].replace("_", "."), day(text)) for name, text in days.items()]
    return Index({"transformers": tuple(sorted(found, key=lambda each: Version(each.version)))})


def new(found: Index, *known: str) -> list[str]:
    return [each.version for each in new_releases(found, {"transformers": frozenset(map(Version, known))})]


def test_a_release_with_a_higher_number_is_new() -> None:
    assert new(index(v5_0="2026-05-01", v5_1="2026-06-01", v5_2="2026-06-02"), "5.0") == ["5.1", "5.2"]


def test_a_patch_of_an_older_series_is_new_where_it_came_later() -> None:
    found = index(v5_0="2026-05-01", v5_0_1="2026-06-10", v5_1="2026-06-01")
    assert new(found, "5.0", "5.1") == ["5.0.1"]


def test_what_the_matrix_has_left_out_is_not_new() -> None:
    """It has the last patch of each series, and not every one before."""
    assert new(index(v5_0="2026-05-01", v5_0_1="2026-05-10", v5_1="2026-06-01"), "5.0", "5.1") == []


def test_of_a_package_that_nobody_knows_nothing_is_new() -> None:
    assert new(index(v5_0="2026-05-01")) == []


def test_a_known_release_that_the_index_has_no_more_hides_no_newer_one() -> None:
    """Yanked, say: by its number the other one is still newer, and by its day nothing can be said."""
    assert new(index(v5_0_1="2026-06-10", v5_2="2026-06-01"), "5.1") == ["5.2"]


def test_the_matrix_knows_its_cells_and_their_locks(matrix: Matrix, checkout: WatchLayout) -> None:
    known = known_now(matrix, checkout)
    assert {package: sorted(map(str, found)) for package, found in known.versions.items() if found} == {
        "accelerate": ["1.0.0"],
        "datasets": ["5.0.0"],
        "peft": ["0.1.0"],
        "torch": ["2.0.0"],
        "transformers": ["5.0.0"],
        "trl": ["1.0.0"],
    }
    assert known.base.cell_id == "trl1.0.0-tf5.0.0"
    found = new_releases(ask(STACK, matrix.python, False).before(day("2026-06-16")), known.versions)
    assert [f"{each} {each.day}" for each in found] == [
        "transformers 5.0.1 2026-06-06",
        "transformers 5.1.0 2026-06-05",
        "transformers 5.2.0 2026-06-15",
        "trl 1.1.0 2026-06-10",
        "accelerate 1.1.0 2026-06-10",
    ]
    assert known.previous("transformers", "5.1.0") == "5.0.0"
    assert known.previous("transformers", "4.0") == ""


def test_pre_releases_are_listed_on_request_alone(matrix: Matrix, asked: list[str]) -> None:
    assert [each.version for each in ask(["trl"], "3.11", False).all()] == ["1.0.0", "1.1.0", "1.2.0"]
    assert [each.version for each in ask(["trl"], "3.11", True).all()] == ["1.0.0", "1.1.0", "1.2.0", "1.3.0rc1"]
    assert asked.count("trl") >= 2


def test_a_past_knows_what_was_out_before_its_day(matrix: Matrix, asked: list[str]) -> None:
    found = known_before(matrix, ask(STACK, matrix.python, False), day("2026-06-10"))
    assert sorted(map(str, found.versions["trl"])) == ["1.0.0"]  # 1.1.0 came on that day, not before
    assert found.base.packages["transformers"] == "5.1.0"
    assert found.base.date == datetime.date(2026, 6, 10)


def test_an_index_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    with pytest.raises(MatrixError, match=r"could not be asked for deepspeed.*check the network"):
        ask(["deepspeed"], "3.11", False)


def test_a_matrix_without_a_whole_cell_is_refused(matrix: Matrix, checkout: WatchLayout) -> None:
    checkout.matrix.write_text(checkout.matrix.read_text().replace(', transformers = "5.0.0"', ""))
    from pytest_trlcompat.matrix.parsing import read_matrix

    with pytest.raises(MatrixError, match="no cell that pins trl and transformers alone"):
        known_now(read_matrix(checkout.matrix), checkout)
