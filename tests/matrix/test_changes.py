"""Since when a verdict stands, and what changed since the last published sweep."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from pytest_trlcompat.catalog import evidence
from pytest_trlcompat.catalog.evidence import Evidence, Key, MeasuredCell
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix import history
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.history import Past
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report import explorer, pages
from pytest_trlcompat.matrix.report.changes import Change, Changes, Standing, compare
from pytest_trlcompat.matrix.report.command import main
from pytest_trlcompat.matrix.report.publish import publish, write_pages
from tests.matrix.test_publish import CURED, FINE, NEW, OLD, WASTEFUL, checkout, sweep

__all__ = ["checkout"]

KEY: Key = ("grpo-a", "upstream", "zero3")
OTHER: Key = ("grpo-b", "upstream", "zero3")
OK, BROKEN, SILENT, BLOCKED, ERROR = (
    Verdict.OK,
    Verdict.BROKEN,
    Verdict.SILENT,
    Verdict.BLOCKED,
    Verdict.ERROR,
)


def swept(day: str, verdict: Verdict | None, by: str = "", *, attributed: bool = True, **versions: str) -> Evidence:
    """One cell with one verdict, or with none of this key."""
    verdicts = {OTHER: OK} if verdict is None else {KEY: verdict, OTHER: OK}
    blocked_by = {KEY: by} if by else {}
    return Evidence(
        day, (MeasuredCell("trl0.15.2", {"trl": "0.15.2", **versions}, verdicts, None, attributed, blocked_by),)
    )


@pytest.mark.parametrize(
    ("past", "now", "standing", "text"),
    [
        ([], OK, None, ""),
        ([OK], OK, Standing("2026-01-01"), "at least since 2026-01-01"),
        ([OK, OK, OK], OK, Standing("2026-01-01"), "at least since 2026-01-01"),
        ([OK, BROKEN], BROKEN, Standing("2026-01-02", "ok", "2026-01-01"), "since 2026-01-02, ok until 2026-01-01"),
        ([OK, SILENT, OK, OK], OK, Standing("2026-01-03", "silent", "2026-01-02"), None),
        ([OK, OK], BROKEN, Standing("2026-02-01", "ok", "2026-01-02"), "since 2026-02-01, ok until 2026-01-02"),
        ([OK, None], OK, Standing("2026-01-01"), None),
        ([BROKEN, None, OK], OK, Standing("2026-01-03", "broken", "2026-01-01"), None),
        ([None, None], OK, Standing("2026-02-01"), "at least since 2026-02-01"),
    ],
)
def test_since_when_a_verdict_stands(
    past: list[Verdict | None], now: Verdict, standing: Standing | None, text: str | None
) -> None:
    sweeps = tuple(swept(f"2026-01-{number:02}", verdict) for number, verdict in enumerate(past, 1))
    found = compare(swept("2026-02-01", now), Past(sweeps)).standing.get("trl0.15.2", {}).get(KEY)
    assert found == standing
    assert text is None or (found.describe() if found else "") == text


def test_a_change_says_what_it_was_and_which_versions_are_others() -> None:
    past = Past((swept("2026-01-01", OK, torch="2.13.0"),))
    changes = compare(swept("2026-02-01", SILENT, torch="2.14.1"), past)
    (change,) = changes.changed
    assert change == Change("trl0.15.2", KEY, "ok", "2026-01-01", "silent", "torch 2.13.0 to 2.14.1")
    assert change.describe() == (
        "trl0.15.2: grpo-a, upstream, zero3: silent, ok until 2026-01-01, torch 2.13.0 to 2.14.1"
    )
    assert changes.summary == "since the sweep published on 2026-01-01, 1 verdict changed"
    (same,) = compare(swept("2026-02-01", SILENT, torch="2.13.0"), past).changed
    assert same.describe().endswith(", with the same versions of the stack")


def test_a_change_of_long_ago_is_none_since_the_last_sweep() -> None:
    changes = compare(swept("2026-02-01", SILENT), Past((swept("2026-01-01", OK), swept("2026-01-02", SILENT))))
    assert changes.changed == ()
    assert changes.summary == "since the sweep published on 2026-01-02, no verdict changed"
    assert not changes.worth_saying


def test_a_change_within_the_day_of_the_last_sweep_is_one() -> None:
    changes = compare(swept("2026-01-02", SILENT), Past((swept("2026-01-01", SILENT), swept("2026-01-02", OK))))
    assert [change.until for change in changes.changed] == ["2026-01-02"]


def test_who_blocks_is_part_of_a_verdict_as_far_as_it_is_known() -> None:
    known, other = swept("2026-01-01", BLOCKED, "grpo-b"), swept("2026-02-01", BLOCKED, "grpo-c")
    (change,) = compare(other, Past((known,))).changed
    assert (change.before, change.now) == ("blocked by grpo-b", "blocked by grpo-c")
    assert not compare(swept("2026-02-01", BLOCKED), Past((known,))).changed


def test_an_error_of_the_time_before_attribution_did_not_change() -> None:
    unattributed = swept("2026-01-01", ERROR, attributed=False)
    assert not compare(swept("2026-02-01", BLOCKED, "grpo-b"), Past((unattributed,))).changed
    assert compare(swept("2026-02-01", BLOCKED, "grpo-b"), Past((swept("2026-01-01", ERROR),))).changed


def test_new_cells_and_issues() -> None:
    now = swept("2026-02-01", OK)
    more = dataclasses.replace(now.cells[0], id="trl1.0.0")
    changes = compare(dataclasses.replace(now, cells=(*now.cells, more)), Past((swept("2026-01-01", None),)))
    assert (changes.new_issues, changes.new_cells) == (("grpo-a",), ("trl1.0.0",))
    assert changes.summary == (
        "since the sweep published on 2026-01-01, no verdict changed; new: 1 known issue and 1 cell"
    )
    assert changes.of(["trl0.15.2"]).new_cells == ()
    assert Changes().summary == ""


# Published


def day_of(layout: Layout, monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    monkeypatch.setattr("pytest_trlcompat.matrix.report.publish.last_day", lambda results: day)


def test_what_was_published_is_kept_when_another_day_takes_its_place(
    checkout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = sweep(checkout, (OLD, (WASTEFUL, CURED)))
    day_of(checkout, monkeypatch, "2026-01-01")
    assert checkout.history not in {path.parent for path in publish(report, checkout)}
    assert not checkout.history.exists()
    first = evidence.load(checkout.evidence)
    day_of(checkout, monkeypatch, "2026-01-08")
    assert publish(report, checkout)[-1] == checkout.history / "2026-01-01.json.gz"
    assert history.read(checkout.history).sweeps == (first,)
    publish(report, checkout)  # of one day the last counts
    assert history.read(checkout.history).sweeps == (first,)
    day_of(checkout, monkeypatch, "2026-01-07")
    with pytest.raises(
        MatrixError, match=r"was measured until 2026-01-08, these cells until 2026-01-07; run them again"
    ):
        publish(report, checkout)
    publish(report, checkout, keep=True)
    assert evidence.load(checkout.evidence).date == "2026-01-08", "what is kept is as new as before"
    checkout.evidence.write_text("{")
    publish(report, checkout)
    assert evidence.load(checkout.evidence).date == "2026-01-07", "what cannot be read is made again"


def test_pages_and_reports_say_what_changed(
    checkout: Layout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    day_of(checkout, monkeypatch, "2026-01-01")
    publish(sweep(checkout, (OLD, (WASTEFUL, CURED))), checkout)
    for path in checkout.results.glob("*"):
        path.unlink()
    day_of(checkout, monkeypatch, "2026-01-08")
    sweep(checkout, (OLD, (FINE, CURED)), (NEW, (FINE,)))
    arguments = [str(checkout.results), "--history", str(checkout.root)]
    assert main(arguments) == 0
    line = f"{OLD.id}: grpo-logits-to-keep, upstream, single: ok, wasteful until 2026-01-01"
    out = capsys.readouterr().out
    assert out.startswith("Since the sweep published on 2026-01-01, 1 verdict changed; new: 1 cell:")
    assert line in out
    for name in ("compat.md", "compat.html"):
        assert line in (checkout.results / name).read_text()
    text = (checkout.results / "compat.html").read_text()
    assert '"changed":[' in text
    assert since_of(text) == {
        (NEW.id, "upstream"): "at least since 2026-01-08",
        (OLD.id, "upstream"): "since 2026-01-08, wasteful until 2026-01-01",
        (OLD.id, "corrected"): "at least since 2026-01-01",
    }
    assert "changed since 2026-01-01</option>" in text
    assert '"since_published"' in (checkout.results / "compat.json").read_text()

    assert not checkout.history.exists()
    checkout.evidence.unlink()
    assert main(arguments) == 0
    assert "Since the sweep" not in capsys.readouterr().out
    assert "What changed" not in (checkout.results / "compat.md").read_text()
    assert '"since":[]' in (checkout.results / "compat.html").read_text()


def since_of(page: str) -> dict[tuple[str, str], str]:
    """What the page's script reads: a text for each verdict of one known issue, from runs of columns."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    data = json.loads(found)
    texts = {}
    for cell in data["cells"]:
        each = [data["since"][text] for text, length in cell["since"] for _ in range(length)]
        assert len(each) == len(data["columns"])
        for (_, subject, _), letter, text in zip(data["columns"], cell["verdicts"], each, strict=True):
            if letter != ".":
                texts[cell["id"], ["upstream", "corrected"][subject]] = text
    return texts


def test_a_damaged_history_costs_no_report(checkout: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    publish(sweep(checkout, (OLD, (WASTEFUL, CURED))), checkout)
    checkout.history.mkdir()
    (checkout.history / "2023-01-01.json.gz").write_bytes(b"x")
    checkout.evidence.write_text("{")
    assert main([str(checkout.results), "--history", str(checkout.root)]) == 0
    out, err = capsys.readouterr()
    assert "1 cell, 2 verdicts: all as predicted" in out
    assert "2023-01-01.json.gz: it is cut short; this sweep is left out" in err.replace("\n", " ")
    assert "evidence.json: " in err


def test_the_published_pages_say_what_changed_since_the_sweep_before(
    checkout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    day_of(checkout, monkeypatch, "2026-01-01")
    publish(sweep(checkout, (OLD, (WASTEFUL, CURED))), checkout)
    assert "What changed" not in checkout.page.read_text()
    found = evidence.load(checkout.evidence)
    checkout.evidence.write_text(dataclasses.replace(found, date="2026-01-08").to_json())
    before = dataclasses.replace(found.cells[0], verdicts={**found.cells[0].verdicts, WASTEFUL.key: OK})
    history.keep(Evidence("2026-01-01", (before,)), checkout.history)
    write_pages(checkout)
    text = checkout.page.read_text()
    assert "Since the sweep published on 2026-01-01, 1 verdict changed." in text
    assert f"- {OLD.id}: grpo-logits-to-keep, upstream, single: wasteful, ok until 2026-01-01, with the same" in text
    assert "ok until 2026-01-01" in checkout.explorer.read_text()


def test_nothing_is_said_of_the_past_where_it_is_not_asked_for(checkout: Layout) -> None:
    report = sweep(checkout, (OLD, (WASTEFUL,)))
    assert "What changed" not in pages.markdown(report)
    assert 'id="changed"' not in explorer.html(report)
