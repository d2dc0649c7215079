"""Cells and verdicts of which the tests of the report make one."""

from __future__ import annotations

import dataclasses

from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.results import Sidecar

NEW = Sidecar(
    "trl1.0.0-tf4.57.6",
    {"trl": "1.0.0", "transformers": "4.57.6"},
    "tested",
    "now",
    lock={"accelerate": "1.13.0", "trl": "1.0.0"},
    date="2026-04-02",
    seconds=12.5,
)
OLD = dataclasses.replace(
    NEW, id="trl0.9.6-tf4.42.4", pins={"trl": "0.9.6", "transformers": "4.42.4"}, sweep="before", seconds=41.0
)
UNBUILT = Sidecar(
    "trl9.9.9", {"trl": "9.9.9"}, "untestable", "now", reason="there is no version of trl==9.9.9\n| so <b>stop</b>"
)

FINE = Record("grpo-b", "corrected", "single", Verdict.OK, Verdict.OK, {"kept": 6}, 0.25)
PREDICTED = Record("grpo-b", "upstream", "single", Verdict.BROKEN, Verdict.BROKEN, {"text": "<script>x</script>"}, 1.0)
SURPRISE = Record("grpo-a", "upstream", "fsdp1", Verdict.SILENT, Verdict.OK, {"max_abs_error": 0.3})
CRASH = Record("grpo-a", "upstream", "fsdp1-no_shard", Verdict.ERROR, None, {"failure": "a\n\x1b[31mb\x00"})
GONE = Record("grpo-a", "upstream", "zero3", Verdict.ABSENT, Verdict.ABSENT)
