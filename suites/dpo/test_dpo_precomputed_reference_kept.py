"""Known issue ``dpo-precomputed-reference-kept``: a reference model that nothing asks any more.

Right is: with ``precompute_ref_log_probs`` and no reference model of its own a trainer keeps the policy alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import dpo
from ..verdicts import failure_of

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

ISSUE = "dpo-precomputed-reference-kept"
pytestmark = pytest.mark.known_issue("dpo-precomputed-reference-kept")


def test_kept(subject: str, judge: Judge, launches: LaunchCache, saved_qwen2: TinyModel) -> None:
    def measure() -> Finding:
        with tempfile.TemporaryDirectory(prefix="trlcompat-") as folder:
            launches(dpo.save, saved_qwen2, Path(folder), strategy="single")
            (found,) = launches(dpo.kept, subject, saved_qwen2, Path(folder), strategy="single", sharded=False).values
        failures = {"precomputing": found["failure"]} if found["failure"] else {}
        if failed := failure_of(ISSUE, failures):
            return Finding(failed, {"failures": failures})
        return Finding(Verdict.WASTEFUL if found["beside"] else Verdict.OK, found)

    judge(measure, subject=subject, strategy="single")
