"""The module ``evidence``: what a sweep leaves for those who run nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.evidence import Evidence, EvidenceError, MeasuredCell, Origin
from pytest_trlcompat.catalog.issue import kind
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix.report.publish import report_of
from pytest_trlcompat.stack import OPTIONAL, PACKAGES

CELL = MeasuredCell(
    "trl0.15.2-tf4.48.3",
    {"trl": "0.15.2", "transformers": "4.48.3"},
    {("a", "upstream", "zero3"): Verdict.SILENT, ("a", "corrected", "zero3"): Verdict.OK},
    "2025-02-28",
)


def test_evidence_comes_back_as_it_was_written_one_line_a_cell() -> None:
    written = Evidence("2026-11-21", (CELL, CELL))
    text = written.to_json()
    assert Evidence.from_json(text) == written
    assert len(text.splitlines()) == 4
    assert '"verdicts": {"a": {"upstream": {"zero3": "silent"}, "corrected": {"zero3": "ok"}}}' in text


def test_what_fits_and_what_blocked_are_written_with_the_verdict() -> None:
    blocked, absent, other = (("a", "upstream", label) for label in ("single-x", "single-y", "single-z"))
    verdicts = {blocked: Verdict.BLOCKED, absent: Verdict.ABSENT, other: Verdict.BLOCKED}
    cell = MeasuredCell("c", {}, verdicts, None, True, {blocked: "b", other: "b"}, frozenset({blocked, absent}))
    text = Evidence("", (cell,)).to_json()
    assert '{"single-x": "blocked by b (fits)", "single-y": "absent (fits)", "single-z": "blocked by b"}' in text
    assert Evidence.from_json(text).cells == (cell,)


def test_only_the_packages_of_the_stack_are_kept_in_their_order() -> None:
    cell = MeasuredCell("c", {"trl": "1.0", "aiohttp": "3", "torch": "2.13.0"}, {})
    (kept,) = Evidence.from_json(Evidence("", (cell,)).to_json()).cells
    assert list(kept.versions.items()) == [("torch", "2.13.0"), ("trl", "1.0")]


def test_the_releases_of_torch_stand_in_the_first_line_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [MeasuredCell(torch, {"torch": torch}, {}) for torch in ("2.13.0", "2.6.0", "2.13.0")]
    written = Evidence("2026-11-21", (*cells, CELL))
    assert written.torches == ("2.6.0", "2.13.0")
    path = tmp_path / "evidence.json"
    monkeypatch.setattr(evidence, "_published", lambda: path)
    assert evidence.published_torches() == ()
    assert evidence.fingerprint() == (0, 0)
    for text, torches in (
        (written.to_json(), ("2.6.0", "2.13.0")),
        (Evidence("", ()).to_json(), ()),
        ('{"schema": 1, "date": "", "cells": [\n]}', ()),
        ("nothing", ()),
    ):
        path.write_text(text)
        assert evidence.published_torches() == torches
    assert evidence.fingerprint()[0] == len("nothing")


def test_the_published_evidence_tells_its_torch_in_the_first_line() -> None:
    assert evidence.published_torches() == evidence.published().torches != ()


def test_strategies_are_those_that_some_cell_was_asked_about() -> None:
    found = Evidence("", (CELL,))
    assert found.strategies("a") == ["zero3"]
    assert found.strategies("b") == []


def changed(field: str, value: object) -> str:
    """Evidence of one cell, of which a field is another one."""
    raw = json.loads(Evidence("", (CELL,)).to_json())
    raw["cells"][0][field] = value
    return json.dumps(raw)


@pytest.mark.fault(
    "Published evidence holds a name, a version or a day that is none, NaN, a name twice, or is nested 100,000 deep.",
    "The doctor and the report name the file, the cell and what is wrong, and say how to make it again.",
)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not the evidence of a sweep"),
        ("[]", "not the evidence of a sweep"),
        ('{"schema": true, "date": "", "cells": []}', "a schema from 1 to 4 was expected, True was found"),
        ('{"schema": 5, "date": "", "cells": []}', "a schema from 1 to 4 was expected, 5 was found"),
        ('{"schema": 1, "date": "", "cells": [{"id": "a"}]}', "not the evidence of a sweep"),
        (Evidence("", (CELL,)).to_json().replace("silent", "loud"), "not the evidence of a sweep .*loud"),
        (changed("id", "<b>"), "the cell '<b>': '<b>' is no name"),
        (changed("id", None), "'id' is missing, or no str: 'None'"),
        (changed("stack", {"trl": ["1.0"]}), "the cell '.*': has an invalid version of trl: "),
        (changed("stack", {"trl": "1.0\n"}), r"the cell '.*': has an invalid version of trl: '1.0\\n'"),
        (changed("stack", {"trl": "\x1b[2J"}), r"has an invalid version of trl: '\\x1b\[2J'"),
        (changed("date", "| <b>"), r"'date' is no day: '\| <b>'"),
        (changed("verdicts", {"a": {"upstream": {"<b>": "ok"}}}), "'<b>' is no name"),
        (changed("verdicts", {"a": {"upstream": {"b": "blocked by <b>"}}}), "'<b>' is no name"),
        (changed("verdicts", {"a": 3}), "its verdicts cannot be read"),
        ("[" * 100_000, "not JSON that can be read: maximum recursion depth"),
        (Evidence("", (CELL,)).to_json().replace('"date": ""', '"date": NaN'), "JSON has no NaN"),
        (Evidence("", (CELL,)).to_json().replace('"date": ""', '"schema": 2'), "'schema' stands twice"),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "evidence.json"
    path.write_text(text)
    with pytest.raises(EvidenceError, match=reason) as caught:
        evidence.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).endswith("; make it again with: nox -s report -- --publish")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="No such file"):
        evidence.load(tmp_path / "nowhere.json")


def test_the_published_evidence_is_of_known_issues_and_whole_stacks() -> None:
    published = evidence.published()
    assert published.date >= "2026-11-21"
    assert published.cells
    for cell in published.cells:
        assert tuple(cell.versions) == tuple(
            name for name in PACKAGES if name not in OPTIONAL or name in cell.versions
        ), cell.id
        assert {issue for issue, _, _ in cell.verdicts} <= set(known_issues.load()), cell.id


def test_what_was_published_is_what_the_catalogue_predicts() -> None:
    assert report_of(evidence.published()).wrong == []


def test_an_error_of_before_failures_were_attributed_is_no_other_verdict_than_blocked() -> None:
    key, other = ("a", "upstream", "zero3"), ("a", "upstream", "ddp")
    verdicts = {key: Verdict.ERROR, other: Verdict.OK}
    new, old = (MeasuredCell("c", {}, verdicts, attributed=attributed) for attributed in (True, False))
    assert [cell.gave(key, Verdict.BLOCKED) for cell in (new, old)] == [False, True]
    assert [cell.gave(key, Verdict.ERROR) for cell in (new, old)] == [True, True]
    for cell in (new, old):
        assert not cell.gave(other, Verdict.BLOCKED)
        assert not cell.gave(key, Verdict.OK)
        assert not cell.gave(("b", "upstream", "ddp"), Verdict.BLOCKED)


def test_a_verdict_says_with_what_it_was_measured_and_when() -> None:
    keys = [("a", "upstream", "ddp"), ("a", "corrected", "ddp"), ("b", "upstream", "ddp")]
    newest, kept, unknown = (
        Origin(f"{'a' * 12}.{'b' * 12}", "2026-11-27"),
        Origin(f"{'c' * 12}.{'b' * 12}", "2026-11-22"),
        Origin("", "2026-11-21"),
    )
    verdicts = {keys[0]: Verdict.OK, keys[1]: Verdict.BLOCKED, keys[2]: Verdict.OK}
    cell = MeasuredCell(
        "c",
        {},
        verdicts,
        blocked_by={keys[1]: "b"},
        fitting=frozenset({keys[1]}),
        origin=newest,
        other_origins={keys[1]: kept, keys[2]: unknown},
    )
    text = Evidence("2026-11-27", (cell,)).to_json()
    assert '"blocked by b (fits) @1"' in text
    (read,) = Evidence.from_json(text).cells
    assert read == cell
    assert [read.origin_of(key) for key in keys] == [newest, kept, unknown]
    for schema in (1, 2, 3):
        cells = [{"id": "c", "date": "", "stack": {}, "verdicts": {}}]
        (read,) = Evidence.from_json(json.dumps({"schema": schema, "date": "", "cells": cells})).cells
        assert (read.origin, read.origin_of(keys[0], "2026-11-20")) == (None, Origin("", "2026-11-20"))


@pytest.mark.parametrize(
    ("measured", "verdict", "reason"),
    [
        ([["x", "2026-11-27"]], "ok", "'measured' names no digests of code and packages: 'x'"),
        ([["", "today"]], "ok", "'date' is no day: 'today'"),
        (["", "2026-11-27"], "ok", "'measured' is no list of provenances and days"),
        ([["", "2026-11-27"], ["", "2026-11-26"]], "ok @2", "the origins of its verdicts cannot be read"),
        ([["", "2026-11-27"], ["", "2026-11-26"]], "ok @x", "the origins of its verdicts cannot be read"),
    ],
)
def test_a_damaged_origin_is_refused(measured: object, verdict: str, reason: str) -> None:
    cell = {"id": "c", "date": "", "stack": {}, "measured": measured, "verdicts": {"a": {"upstream": {"ddp": verdict}}}}
    with pytest.raises(EvidenceError, match=reason):
        Evidence.from_json(json.dumps({"schema": 4, "date": "", "cells": [cell]}))


def test_what_was_not_attributed_stays_so_when_it_is_published_again() -> None:
    old = '{"schema": 1, "date": "2026-11-21", "cells": [{"id": "a", "date": null, "stack": {}, "verdicts": {}}]}'
    (cell,) = Evidence.from_json(old).cells
    assert not cell.attributed
    written = Evidence("2026-11-21", (cell, MeasuredCell("b", {}, {})))
    assert '"schema": 4' in written.to_json()
    assert written.to_json().count('"attributed": false') == 1
    assert [each.attributed for each in Evidence.from_json(written.to_json()).cells] == [False, True]


MEASURED_UNDER_ONE = {"transformers-resume", "ppo-config-after-grpo", "ppo-newer-trainer"}
"""Show under every strategy, and are measured where a checkpoint is resumed anyway, or where PPO trains anyway."""


def test_an_entry_that_shows_only_when_ranks_share_a_model_says_so() -> None:
    """Else the doctor takes it for one that shows under every strategy."""
    for issue in known_issues.load().values():
        measured = sorted({kind(strategy) for strategy in evidence.published().strategies(issue.id)})
        silent = not issue.strategies and measured and "single" not in measured and issue.id not in MEASURED_UNDER_ONE
        assert not silent, f"{issue.id} was measured under {', '.join(measured)} alone: list its strategies"


def test_a_list_of_strategies_names_all_that_were_measured() -> None:
    for issue in known_issues.load().values():
        if issue.strategies:
            assert set(evidence.published().strategies(issue.id)) <= set(issue.strategies), issue.id


def test_who_blocked_is_kept_and_another_one_is_seen() -> None:
    key, other = ("a", "upstream", "zero3"), ("a", "upstream", "ddp")
    verdicts = {key: Verdict.BLOCKED, other: Verdict.BLOCKED}
    cell = MeasuredCell("c", {}, verdicts, blocked_by={key: "grpo-evaluate"})
    text = Evidence("2026-11-21", (cell,)).to_json()
    assert '"zero3": "blocked by grpo-evaluate", "ddp": "blocked"' in text
    (again,) = Evidence.from_json(text).cells
    assert again == cell
    assert again.gave(key, Verdict.BLOCKED)
    assert again.gave(key, Verdict.BLOCKED, "grpo-evaluate")
    assert not again.gave(key, Verdict.BLOCKED, "grpo-train-sampler")
    assert not again.gave(key, Verdict.ERROR)
    assert again.gave(other, Verdict.BLOCKED, "grpo-evaluate"), "who blocked is not known"
