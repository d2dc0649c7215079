"""Three cells, with what a library might say to break a page."""

from __future__ import annotations

import dataclasses

from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.report.model import CellReport, Report
from pytest_trlcompat.matrix.results import Sidecar

EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\x00\x1b[31m \ud800 &amp; \"'"

LOGITS, TEMPERATURE, SAVE, LORA = "grpo-logits-to-keep", "grpo-temperature", "ppo-ddp-save", "lora-fsdp-save"


def _cell(trl: str, transformers: str, *records: Record, state: str = "tested") -> CellReport:
    lock = {"trl": trl, "transformers": transformers, "accelerate": "1.4.0", "an-odd-one": "1.0"}
    pins = {"trl": trl, "transformers": transformers}
    sidecar = Sidecar(f"trl{trl}-tf{transformers}", pins, state, "now", lock, "2025-02-28", "it hung", 12.0)
    return CellReport(sidecar, records)


def _verdict(issue: str, verdict: Verdict, strategy: str = "single", **evidence: object) -> Record:
    return Record(issue, "upstream", strategy, verdict, verdict, dict(evidence), 1.5)


def _ours(record: Record) -> Record:
    return dataclasses.replace(record, subject="corrected", verdict=Verdict.OK, expected=Verdict.OK, evidence={"n": 7})


OLD = (
    _verdict(LOGITS, Verdict.WASTEFUL, message=EVIL, numbers=[1.5, 2]),
    _verdict(LOGITS, Verdict.BROKEN, "single-neither", traceback="Traceback\n  line 1\nTypeError: no"),
    _verdict(TEMPERATURE, Verdict.SILENT),
    _verdict(SAVE, Verdict.BROKEN, "ddp"),
    _verdict(LORA, Verdict.BLOCKED, "fsdp1", blocked_by="grpo-fsdp-generation"),
)
NEW = (
    _verdict(LOGITS, Verdict.OK),
    dataclasses.replace(_verdict(TEMPERATURE, Verdict.SILENT), expected=Verdict.OK),
    _verdict(SAVE, Verdict.ABSENT, "ddp"),
    _verdict(LORA, Verdict.OK, "fsdp1"),
    _verdict(LORA, Verdict.UNTESTABLE, "fsdp2", reason="no kernel"),
)

REPORT = Report(
    (
        _cell("0.15.2", "4.48.3", *OLD, *map(_ours, OLD)),
        _cell("0.18.2", "4.52.4", state="interrupted"),
        _cell("1.0.0", "4.57.6", *NEW, *map(_ours, NEW)),
    )
)
