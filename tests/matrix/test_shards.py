"""Parts of a sweep: every cell in one of them, balanced by what cells cost, and merged into what the whole is."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_trlcompat.catalog.evidence import load
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix import shards
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report.command import main
from pytest_trlcompat.matrix.report.model import gather
from pytest_trlcompat.matrix.results import TESTED, Sidecar
from pytest_trlcompat.matrix.shards import bring_together, costs, keep_part, keep_seconds, requested_shard, shard_of

CHECKOUT = Layout(Path(__file__).resolve().parents[2])
CELLS = [Cell({"trl": f"0.{minor}.0"}) for minor in range(10, 20)]
SECONDS = dict(zip((cell.id for cell in CELLS), (90.0, 10, 20, 80, 30, 70, 40, 60, 50, 50), strict=True))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], None),
        (["--full", "--shard", "3/16"], (3, 16)),
        (["--shard=1/1"], (1, 1)),
        (["--", "--issue", "a", "--shard", "16/16"], (16, 16)),
    ],
)
def test_a_part_is_its_number_of_so_many(arguments: list[str], found: tuple[int, int] | None) -> None:
    assert requested_shard(arguments) == found


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "1/0", "a/b", "-1/3", "1/3/5", "01/3"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(MatrixError, match=r"is no part; write for example 3/16, the third of sixteen"):
        requested_shard([shards.SHARD, text])


def test_parts_are_balanced_by_cost() -> None:
    parts = [shard_of(CELLS, SECONDS, (number, 4)) for number in range(1, 5)]
    loads = [sum(SECONDS[cell.id] for cell in part) for part in parts]
    assert (sum(loads), min(loads), max(loads)) == (500, 120, 130)
    assert [cell.id for cell in parts[0]] == [cell.id for cell in CELLS if cell in parts[0]]  # in their order


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=40), st.data())
def test_every_cell_is_in_one_part_and_none_is_far_longer_than_the_mean(
    seconds: list[float], data: st.DataObject
) -> None:
    cells = [Cell({"trl": f"1.{number}.0"}) for number in range(len(seconds))]
    cost = {cell.id: each for cell, each in zip(cells, seconds, strict=True) if data.draw(st.booleans())}
    count = data.draw(st.integers(1, len(cells)))
    parts = [shard_of(cells, cost, (number, count)) for number in range(1, count + 1)]
    assert sorted(cell.id for part in parts for cell in part) == sorted(cell.id for cell in cells)
    assert all(parts)
    if len(cost) == len(cells):
        loads = [sum(cost[cell.id] for cell in part) for part in parts]
        assert max(loads) <= sum(loads) / count + max(cost.values()) or math.isclose(max(loads), max(cost.values()))


def test_more_parts_than_cells_are_refused() -> None:
    with pytest.raises(MatrixError, match=r"^--shard 11/11: there are 10 cells; ask for 10 parts at most$"):
        shard_of(CELLS, SECONDS, (11, 11))


def test_what_a_cell_took_counts_else_its_verdicts(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    (tmp_path / "fixtures").mkdir()
    assert costs(layout) == {}
    layout.evidence.write_bytes(CHECKOUT.evidence.read_bytes())
    counted = {
        cell.id: sum(each is not Verdict.ABSENT for each in cell.verdicts.values())
        for cell in load(layout.evidence).cells
    }
    assert costs(layout) == counted
    first, second, *_ = counted
    sidecars = [Sidecar(first, {}, TESTED, "", seconds=100.04), Sidecar("other", {}, TESTED, "", seconds=7.0)]
    keep_seconds([*sidecars, Sidecar("never", {}, TESTED, "")], layout)
    assert json.loads(layout.seconds.read_text()) == {"other": 7.0, first: 100.0}
    found = costs(layout)
    assert (found[first], found["other"]) == (100.0, 7.0)
    assert found[second] == pytest.approx(counted[second] * 100.0 / counted[first])
    keep_seconds([Sidecar(first, {}, TESTED, "", seconds=50.0)], layout)
    assert json.loads(layout.seconds.read_text()) == {"other": 7.0, first: 50.0}
    layout.seconds.write_text("[]")
    with pytest.raises(MatrixError, match=r"seconds.json: .*; publish a sweep again"):
        costs(layout)


@dataclasses.dataclass(frozen=True)
class PartLayout(Layout):
    folder: Path = Path()

    @property
    def results(self) -> Path:
        return self.folder


def write(folder: Path, *names: str, verdict: Verdict = Verdict.OK, code: str = "a") -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        sidecar = Sidecar(name, {"trl": name.removeprefix("trl")}, TESTED, "sweep", seconds=1.0)
        sidecar = dataclasses.replace(sidecar, provenance=code and f"{code * 12}.{'b' * 12}")
        (folder / f"{name}.cell.json").write_text(sidecar.to_json())
        record = Record("grpo-eval-remainder", "upstream", "single", verdict, None)
        (folder / f"{name}.jsonl").write_text(record.to_json() + "\n")
    return folder


def test_parts_that_are_merged_are_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write(tmp_path / "whole", "trl0.17.0", "trl0.18.0", "trl0.19.0")
    one, two = write(tmp_path / "one", "trl0.17.0", "trl0.19.0"), write(tmp_path / "two", "trl0.18.0")
    results = tmp_path / "results"
    results.mkdir()
    main([str(results), "--merge", str(one), str(two)])
    assert "merged: 3 cells" in capsys.readouterr().out
    assert gather(results).to_dict()["cells"] == gather(whole).to_dict()["cells"]
    assert bring_together([one, two, one], results) == 3  # again, and the same twice


@pytest.mark.parametrize(("code", "why"), [("c", "with other code"), ("", "with code and packages that nobody wrote")])
def test_parts_of_other_code_are_not_merged(tmp_path: Path, code: str, why: str) -> None:
    one, two = write(tmp_path / "one", "trl0.17.0"), write(tmp_path / "two", "trl0.18.0", code=code)
    results = tmp_path / "results"
    results.mkdir()
    with pytest.raises(MatrixError, match=f"trl0.18.0 was measured {why}.* than trl0.17.0"):
        bring_together([one, two], results)
    assert list(results.iterdir()) == []


def test_a_sweep_of_which_a_part_or_a_cell_is_missing_is_not_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    one, two = write(tmp_path / "one", "trl0.17.0"), write(tmp_path / "two", "trl0.18.0")
    for folder, number, names in ((one, 1, ["0.17.0"]), (two, 3, ["0.18.0", "0.19.0"])):
        layout = dataclasses.replace(PartLayout(tmp_path), folder=folder)
        keep_part(layout, [Cell({"trl": name}) for name in names], (number, 3))
    assert main([str(results), "--merge", str(one), str(two)]) == 1
    said = "of 6 parts and cells 2 are missing: part 2, trl0.19.0; run what is missing, and merge again"
    assert f"the sweep is not whole: {said}" in capsys.readouterr().err
    assert main([str(results), "--merge", str(one), str(two), "--publish", str(tmp_path)]) == 1
    assert f"not published: {said}" in capsys.readouterr().err
    keep_part(dataclasses.replace(PartLayout(tmp_path), folder=one), [Cell({"trl": "0.17.0"})], (1, 1))
    assert main([str(results), "--merge", str(one)]) == 0


@pytest.mark.parametrize("where", ["part", "results"])
def test_a_cell_that_is_another_one_in_two_folders_is_refused_and_nothing_is_copied(tmp_path: Path, where: str) -> None:
    one = write(tmp_path / "one", "trl0.16.0", "trl0.17.0")
    two = write(tmp_path / "two", "trl0.17.0", verdict=Verdict.SILENT)
    results = tmp_path / "results"
    results.mkdir()
    if where == "results":
        two.rename(results / "two")
        for path in (results / "two").iterdir():
            path.rename(results / path.name)
    before = sorted(path.name for path in results.iterdir())
    with pytest.raises(MatrixError, match=r"^trl0.17.0.jsonl is another one in .* than in .*; remove one of them$"):
        bring_together([one] if where == "results" else [one, two], results)
    assert sorted(path.name for path in results.iterdir()) == before


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_results_is_refused(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "empty"
    if exists:
        folder.mkdir()
    with pytest.raises(MatrixError, match=r"empty has no results of a sweep; name folders that were build/compat"):
        bring_together([folder], tmp_path)
