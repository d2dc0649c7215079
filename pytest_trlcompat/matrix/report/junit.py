"""The report as JUnit XML, for a CI system's own view: a test suite for each cell, a test for each verdict."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from pytest_trlcompat._escaping import printable
from pytest_trlcompat.catalog.summary_parts import expected, measured
from pytest_trlcompat.catalog.verdict import Record, Verdict, is_wrong
from pytest_trlcompat.matrix.report.model import CellReport, Report

__all__ = ["junit"]


def junit(report: Report) -> str:
    """The document. Only what is not as predicted fails: a predicted ``broken`` is a test that passed."""
    root = ElementTree.Element("testsuites", name="pytest-trlcompat")
    for cell in report.cells:
        _suite(root, cell)
    ElementTree.indent(root, " ")
    # Not "unicode", which would declare the encoding of this machine's locale.
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"


def _suite(root: ElementTree.Element, cell: CellReport) -> None:
    unfinished = cell.sidecar.state != "tested"
    skipped = [record for record in cell.verdicts if _skipped(record)]
    suite = _add(
        root,
        "testsuite",
        name=cell.id,
        tests=str(len(cell.verdicts) + unfinished),
        failures=str(len(cell.wrong)),
        errors=str(int(unfinished)),
        skipped=str(len(skipped)),
        time=f"{cell.sidecar.seconds:.3f}",
    )
    properties = _add(suite, "properties")
    for package, version in (cell.sidecar.lock or cell.sidecar.pins).items():
        _add(properties, "property", name=package, value=version)
    if unfinished:
        case = _add(suite, "testcase", classname=cell.id, name="environment", time="0")
        _add(case, "error", type=cell.sidecar.state, message=cell.sidecar.reason or cell.sidecar.state)
    for record in cell.verdicts:
        _case(suite, cell, record)


def _case(suite: ElementTree.Element, cell: CellReport, record: Record) -> None:
    case = _add(
        suite,
        "testcase",
        classname=f"{cell.id}.{record.issue}",
        name=f"{record.subject}[{record.strategy}]",
        time=f"{record.seconds:.3f}",
    )
    if is_wrong(record):
        message = f"{measured(record)}, predicted {expected(record) or 'nothing'}"
        _add(case, "failure", type=str(record.verdict), message=message)
    elif _skipped(record):
        message = record.reason if record.untested else "this release has no such trainer or strategy"
        _add(case, "skipped", type=str(record.verdict), message=message)
    facts = {"verdict": str(record.verdict), "evidence": record.evidence}
    _add(case, "system-out").text = printable(json.dumps(facts, indent=1, ensure_ascii=False))


def _add(parent: ElementTree.Element, tag: str, **attributes: str) -> ElementTree.Element:
    """An element whose attributes XML can hold."""
    return ElementTree.SubElement(parent, tag, {name: printable(value) for name, value in attributes.items()})


def _skipped(record: Record) -> bool:
    return record.verdict in (Verdict.ABSENT, Verdict.UNTESTABLE) and not is_wrong(record)
