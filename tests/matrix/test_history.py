"""Sweeps that were published before: what is written is what is read, in few bytes, and damage costs no other."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat._json_files import Unreadable, read_gzipped
from pytest_trlcompat.catalog.evidence import Evidence, Key, MeasuredCell, load
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix import history
from pytest_trlcompat.matrix.layout import Layout

CHECKOUT = Layout(Path(__file__).resolve().parents[2])
ONE: Key = ("grpo-a", "upstream", "zero3")
TWO: Key = ("grpo-b", "corrected", "single")
STACK = {"torch": "2.13.0", "trl": "0.15.2"}
SWEEP = Evidence(
    "2026-11-22",
    (
        MeasuredCell("trl0.15.2", STACK, {ONE: Verdict.BLOCKED, TWO: Verdict.OK}, "2025-02-28", True, {ONE: "grpo-b"}),
        MeasuredCell("trl1.0.0", {**STACK, "trl": "1.0.0"}, {TWO: Verdict.ERROR}, None, False),
    ),
)


def document(sweep: Evidence = SWEEP) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(history.pack(sweep))))


def test_what_is_kept_is_what_is_read(tmp_path: Path) -> None:
    path = history.keep(SWEEP, tmp_path / "evidence")
    assert path == tmp_path / "evidence" / "2026-11-22.json.gz"
    assert history.read(tmp_path / "evidence") == history.Past((SWEEP,))
    assert path.read_bytes() == history.pack(SWEEP)
    assert path.read_bytes()[4:8] == b"\0\0\0\0", "no time, so that the bytes are the same whenever they are made"


def test_every_verdict_has_a_letter_which_the_file_explains() -> None:
    keys: list[Key] = [("grpo-a", "upstream", f"s{number}") for number in range(len(Verdict))]
    sweep = Evidence("2026-11-22", (MeasuredCell("trl0.15.2", STACK, dict(zip(keys, Verdict, strict=True))),))
    assert history.unpack(json.dumps(document(sweep))) == sweep
    assert document()["letters"]["s"] == "silent"
    swapped = {**document(sweep), "letters": {**document(sweep)["letters"], "s": "broken", "b": "silent"}}
    (cell,) = history.unpack(json.dumps(swapped)).cells
    assert cell.verdicts[keys[list(Verdict).index(Verdict.SILENT)]] is Verdict.BROKEN


def test_the_published_sweep_takes_few_bytes_and_loses_nothing() -> None:
    published = load(CHECKOUT.evidence)
    data = history.pack(published)
    assert history.unpack(gzip.decompress(data).decode()) == published
    assert len(data) * 30 < CHECKOUT.evidence.stat().st_size


def test_what_this_repository_has_kept_can_be_read_and_is_older_than_what_is_published() -> None:
    past = history.read(CHECKOUT.history)
    assert not past.problems
    assert len(past.sweeps) == len(list(CHECKOUT.history.iterdir())) >= 2
    days = [sweep.date for sweep in past.sweeps]
    assert days == sorted(days)
    assert days[-1] < load(CHECKOUT.evidence).date


def test_sweeps_come_oldest_first_and_those_of_a_day_and_later_can_be_left_out(tmp_path: Path) -> None:
    days = ["2026-11-20", "2026-11-22", "2026-12-01"]
    for day in reversed(days):
        history.keep(Evidence(day, SWEEP.cells), tmp_path)
    assert [sweep.date for sweep in history.read(tmp_path).sweeps] == days
    assert [sweep.date for sweep in history.read(tmp_path, before="2026-11-22").sweeps] == days[:1]
    assert history.read(tmp_path / "none") == history.Past()


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    raw = document()
    change(raw)
    return gzip.compress(json.dumps(raw).encode(), mtime=0)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "it is cut short"),
        (b"not gzip", "it is not what gzip wrote"),
        (history.pack(SWEEP)[:-3], "it is cut short"),
        (history.pack(SWEEP) + b"x", "it goes on after its end"),
        (history.pack(SWEEP)[:-8] + b"\0" * 8, "it is not what gzip wrote"),
        (gzip.compress(b"\0" * (17 * 2**20), mtime=0), "it unpacks to more than 16 MiB"),
        (gzip.compress(b"[1", mtime=0), "it is not JSON"),
        (gzip.compress(b"[1]", mtime=0), "schema 1 was expected, None was found"),
        (changed(lambda raw: raw.update(schema=2)), "schema 1 was expected, 2 was found"),
        (changed(lambda raw: raw.update(schema=True)), "schema 1 was expected, True was found"),
        (changed(lambda raw: raw.update(date="2026-11-23")), "it is of 2026-11-23"),
        (changed(lambda raw: raw.update(date="")), "it is of no day"),
        (changed(lambda raw: raw.update(date="soon")), "'date' is no day: 'soon'"),
        (changed(lambda raw: raw["letters"].update(z="fine")), "the letter 'z' stands for no verdict: 'fine'"),
        (changed(lambda raw: raw["letters"].update({".": "ok"})), "the letter '.' stands for no verdict"),
        (changed(lambda raw: raw["letters"].pop("o")), "the cell 'trl0.15.2': 'o' is the letter of no verdict"),
        (changed(lambda raw: raw["columns"].append(["a", "b"])), "a column is no issue, subject and strategy"),
        (changed(lambda raw: raw["columns"].append(["<a", "b", "c"])), "'<a' is no name"),
        (changed(lambda raw: raw.update(columns=[ONE, ONE])), "a column stands twice"),
        (changed(lambda raw: raw["cells"].append(raw["cells"][0])), "a cell stands twice"),
        (changed(lambda raw: raw["cells"][0].update(verdicts="o")), "'trl0.15.2': it has 1 verdicts for 2 columns"),
        (changed(lambda raw: raw["cells"][0].update(blocked_by={"2": "a"})), "'blocked_by' names no column: '2'"),
        (changed(lambda raw: raw["cells"][0].update(fitting=[9])), "'fitting' names no column: '9'"),
        (changed(lambda raw: raw["cells"][0].update(blocked_by=[])), "'blocked_by' is no object"),
        (changed(lambda raw: raw["cells"][0]["stack"].update(trl="x y")), "has an invalid version of trl: 'x y'"),
        (changed(lambda raw: raw["cells"][0].pop("id")), "'id' is missing"),
        (changed(lambda raw: raw.update(cells=[3])), "'id' is missing"),
    ],
)
@pytest.mark.fault(
    "A sweep that was published earlier cannot be read.", "The report is made; it names the file, and leaves it out."
)
def test_what_cannot_be_read_is_named_and_costs_the_others_nothing(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "2026-11-22.json.gz").write_bytes(data)
    good = Evidence("2026-11-20", SWEEP.cells)
    history.keep(good, tmp_path)
    past = history.read(tmp_path)
    assert past.sweeps == (good,)
    (found,) = past.problems
    assert found.startswith(f"{tmp_path / '2026-11-22.json.gz'}: ")
    assert problem in found
    assert found.endswith("; this sweep is left out of what is said of earlier ones")


def test_what_unpacks_to_far_more_takes_no_memory_for_it(tmp_path: Path) -> None:
    (tmp_path / "2026-11-22.json.gz").write_bytes(gzip.compress(b"\0" * (200 * 2**20), compresslevel=1))
    tracemalloc.start()
    try:
        (problem,) = history.read(tmp_path).problems
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "it unpacks to more than 16 MiB" in problem
    assert peak < 64 * 2**20


def test_nothing_but_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "2026-11-21.json.gz")
    (tmp_path / "2026-11-22.json.gz").symlink_to(CHECKOUT.evidence)
    first, second = history.read(tmp_path).problems
    assert "it is a pipe" in first
    assert "it is a symbolic link" in second
    with pytest.raises(Unreadable, match="No such file"):
        read_gzipped(tmp_path / "none")
