"""Whatever evidence, locks and names hold: each form of the report has the same elements as if they held plain words.

And whatever bytes stand in a cell's files: the report is made, and another cell keeps its verdicts.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_trlcompat._escaping import one_line, printable
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.evidence import Evidence, EvidenceError, MeasuredCell, load
from pytest_trlcompat.catalog.verdict import Record, Verdict, append_record
from pytest_trlcompat.matrix.report import explorer, junit, pages, terminal
from pytest_trlcompat.matrix.report.command import write_all
from pytest_trlcompat.matrix.report.model import CellReport, Report, gather
from pytest_trlcompat.matrix.report.torch_comparison import compare
from pytest_trlcompat.matrix.results import Sidecar
from tests.hostile import PIECES, Parsed, lines, rendered, texts

from .made_up_report import CRASH, FINE, GONE, NEW, OLD, PREDICTED, SURPRISE

pytestmark = pytest.mark.fuzz
# A whole report is made for each example.
fuzzed = settings(
    max_examples=settings().max_examples // 4,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

VERSIONS = st.sampled_from(["0.9.6", "1.16.0", "4.48.3"])
VALUES = st.recursive(
    st.one_of(texts(), st.none(), st.booleans(), st.integers(), st.floats()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(texts(2), inner, max_size=2)),
    max_leaves=4,
)


@st.composite
def reports(draw: st.DrawFn, cells: int = 2) -> Report:
    """Reports all of whose texts are hostile, but for versions, by which cells are sorted."""
    names = draw(st.lists(lines(), min_size=3, max_size=3, unique_by=one_line))
    records = st.builds(
        Record,
        issue=st.sampled_from(names),
        subject=st.sampled_from(["upstream", "corrected", names[0]]),
        strategy=st.sampled_from(names),
        verdict=st.sampled_from(Verdict),
        expected=st.one_of(st.none(), st.sampled_from(Verdict)),
        evidence=st.one_of(
            st.dictionaries(texts(2), VALUES, max_size=2),
            st.fixed_dictionaries({"reason": lines(), "blocked_by": lines(), "blocked_by_expected": lines()}),
        ),
        seconds=st.floats(0, 1e6),
    )
    sidecars = st.builds(
        Sidecar,
        id=lines(),
        pins=st.fixed_dictionaries({"trl": VERSIONS, "transformers": VERSIONS}, optional={"torch": VERSIONS}),
        state=st.one_of(st.sampled_from(["tested", "untestable", "interrupted"]), lines()),
        sweep=texts(),
        lock=st.dictionaries(st.one_of(lines(), st.sampled_from(["peft", "datasets"])), lines(), max_size=2),
        date=st.one_of(st.none(), lines()),
        reason=st.one_of(st.none(), texts()),
        seconds=st.floats(0, 1e6),
    )
    cell = st.builds(CellReport, sidecars, st.lists(records, max_size=3, unique_by=lambda one: one.key).map(tuple))
    found = st.lists(cell, min_size=cells, max_size=cells, unique_by=lambda one: one_line(one.id))
    return Report(tuple(draw(found)), unmeasured=tuple(draw(st.lists(lines(), max_size=2))))


def harmless(report: Report) -> Report:
    """The same report of plain words: another word for each other text."""
    words: dict[str, str] = {}

    def word(text: str) -> str:
        return words.setdefault(text, f"w{len(words)}x") if one_line(text) else ""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return word(value)
        if isinstance(value, Mapping):
            return {name if name in KEPT else word(name): plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    def record(one: Record) -> Record:
        subject = one.subject if one.subject in ("upstream", "corrected") else word(one.subject)
        changed = dataclasses.replace(one, issue=word(one.issue), subject=subject, strategy=word(one.strategy))
        return dataclasses.replace(changed, evidence=plain(one.evidence))

    def cell(one: CellReport) -> CellReport:
        sidecar = one.sidecar
        state = sidecar.state if sidecar.state in ("tested", "untestable", "interrupted") else word(sidecar.state)
        lock = {name if name in KEPT else word(name): word(version) for name, version in sidecar.lock.items()}
        date, reason = sidecar.date and word(sidecar.date), sidecar.reason and word(sidecar.reason)
        changed = dataclasses.replace(sidecar, id=word(sidecar.id), state=state, lock=lock, date=date, reason=reason)
        return CellReport(changed, tuple(map(record, one.verdicts)))

    return Report(tuple(map(cell, report.cells)), tuple(map(word, report.unmeasured)))


KEPT = ("reason", "blocked_by", "blocked_by_expected", "attributed", "peft", "datasets")


@fuzzed
@given(reports())
def test_rendered_markdown_has_no_element_of_the_evidences_making(report: Report) -> None:
    hostile, plain = (Parsed(rendered(pages.markdown(each))) for each in (report, harmless(report)))
    assert hostile.without() == plain.without()
    assert not hostile.others
    for cell in report.cells:
        assert one_line(cell.id) in " ".join(hostile.text.split())


@fuzzed
@given(reports(cells=12))
def test_markdown_of_many_cells_has_none_either(report: Report) -> None:
    hostile, plain = (Parsed(rendered(pages.markdown(each))) for each in (report, harmless(report)))
    # Which cells share a row depends on names.
    assert set(hostile.without()) <= set(plain.without()) | {("a", ("href",)), ("a", ("id",)), ("strong", ())}
    assert not hostile.others


@fuzzed
@given(reports())
def test_html_has_no_element_of_the_evidences_making(report: Report) -> None:
    hostile, plain = (Parsed(explorer.html(each)) for each in (report, harmless(report)))
    assert hostile.without() == plain.without()
    assert hostile.others == plain.others == ["doctype html"]
    data = next(json.loads(script) for script in hostile.scripts if script.startswith('{"published"'))
    assert [cell["id"] for cell in data["cells"]] == [cell.id for cell in report.cells[::-1]]
    assert len(hostile.scripts) == len(plain.scripts)


@fuzzed
@given(reports())
def test_junit_is_xml_with_a_test_for_each_verdict(report: Report) -> None:
    root = ElementTree.fromstring(junit.junit(report).encode())
    assert [suite.get("name") for suite in root] == [printable(cell.id) for cell in report.cells]
    cases = [[case.get("name") for case in suite.iter("testcase")] for suite in root]
    for cell, found in zip(report.cells, cases, strict=True):
        names = [printable(f"{record.subject}[{record.strategy}]") for record in cell.verdicts]
        assert found == ["environment"] * (cell.sidecar.state != "tested") + names


@fuzzed
@given(reports())
def test_a_terminal_gets_text_alone(report: Report) -> None:
    comparison = compare(report.cells, report.columns)
    for show in (terminal.show, lambda each, file: terminal.show_tables(each, file=file, torch=comparison)):
        file = io.StringIO()
        show(report, file=file)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", file.getvalue())
    ending = file.getvalue().splitlines()[-1]
    assert ending == one_line(report.summary)


def changed(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with a part of them taken out, doubled, or replaced."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 40)))
        piece = draw(
            st.one_of(
                st.sampled_from(PIECES).map(lambda text: json.dumps(text)[1:-1].encode()),
                st.sampled_from(PIECES).map(lambda text: text.encode(errors="surrogatepass")),
                st.sampled_from(
                    [b"", b"{", b"}", b"[", b"NaN", b"1e999", b"-1", b"null", b"true", b'"', b"\n", b"\xff"]
                ),
                st.binary(max_size=6),
                st.just(data[start:end] * 2),
            )
        )
        data = data[:start] + piece + data[end:]
    return data


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A sidecar and a file of verdicts, of which something was changed."""
    cell = Sidecar("cell", {"trl": "0.15.2", "transformers": "4.48.3"}, "tested", "s", {"peft": "0.14.0"}, "2025-01-01")
    failing = Record(
        "grpo-logits-to-keep", "upstream", "single", Verdict.ERROR, None, {"exception": "A", "message": "b"}
    )
    records = (FINE, SURPRISE, CRASH, GONE, failing)
    sidecar, verdicts = cell.to_json().encode(), "".join(f"{one.to_json()}\n" for one in records).encode()
    which = draw(st.sampled_from(["sidecar", "verdicts", "both"]))
    return (
        sidecar if which == "verdicts" else changed(draw, sidecar),
        verdicts if which == "sidecar" else changed(draw, verdicts),
    )


@fuzzed
@given(files())
def test_whatever_stands_in_a_cells_files_the_report_is_made(pair: tuple[bytes, bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cell.cell.json").write_bytes(pair[0])
        (folder / "cell.jsonl").write_bytes(pair[1])
        (folder / f"{OLD.id}.cell.json").write_text(OLD.to_json())
        append_record(folder / f"{OLD.id}.jsonl", PREDICTED)
        report = gather(folder).judged_by(known_issues.load())
        write_all(report, folder)
        for show in (terminal.show, terminal.show_tables):
            show(report, file=io.StringIO())
        found = {cell["id"]: cell for cell in json.loads((folder / "compat.json").read_text())["cells"]}
        ElementTree.parse(folder / "compat.xml")
    assert len(found) == 2
    assert [verdict["verdict"] for verdict in found[OLD.id]["verdicts"]] == ["broken"]
    whole = found["cell"]["state"] in ("tested", "interrupted", "running", "untestable")
    assert whole or found["cell"]["reason"]


CELL = MeasuredCell(
    "cell", {"trl": "0.15.2", "torch": "2.13.0"}, {FINE.key: Verdict.OK, CRASH.key: Verdict.BLOCKED}, NEW.date
)


@st.composite
def published(draw: st.DrawFn) -> bytes:
    return changed(draw, Evidence("2026-01-01", (CELL, dataclasses.replace(CELL, id="other"))).to_json().encode())


@fuzzed
@given(published())
def test_whatever_stands_in_published_evidence_is_read_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "evidence.json")
        path.write_bytes(data)
        refused = ""
        try:
            found = load(path)
        except EvidenceError as error:
            refused = str(error)
    if refused:
        assert re.fullmatch(rf"{re.escape(str(path))}: .*; make it again with: nox -s report -- --publish", refused)
    else:
        assert Evidence.from_json(found.to_json()) == found
        assert set(found.torches) <= {cell.versions["torch"] for cell in found.cells if "torch" in cell.versions}
