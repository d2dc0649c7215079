"""Evidence as text for people."""

from __future__ import annotations

import json
import textwrap

from pytest_trlcompat.catalog.verdict import Record, Verdict

__all__ = ["MEANINGS", "evidence"]

MEANINGS = {
    Verdict.OK: "right result at the right cost",
    Verdict.BROKEN: "the known symptom was seen",
    Verdict.SILENT: "no error, wrong result",
    Verdict.WASTEFUL: "right result, wrong cost",
    Verdict.BLOCKED: "another known issue stops the suite first",
    Verdict.ERROR: "a failure that no known issue explains",
    Verdict.HANG: "did not end in time",
    Verdict.ABSENT: "no such trainer or strategy in this release",
    Verdict.UNTESTABLE: "the environment cannot be built, or the software accelerator cannot do what the library needs",
}


def evidence(record: Record) -> str:
    """One fact a line, its value as JSON, and texts as they are."""
    return "\n".join(f"{name}: {_fact(value)}" for name, value in record.evidence.items())


def _fact(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    # A traceback in quotes cannot be read.
    return value if "\n" not in value else "\n" + textwrap.indent(value.strip("\n"), "  ")
