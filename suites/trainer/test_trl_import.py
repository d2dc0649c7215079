"""Known issue ``trl-import``: a release of TRL that cannot be imported beside a newer Transformers.

Neither package declares the limit, so that pip installs the two side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher

pytestmark = pytest.mark.known_issue("trl-import")


def import_trainer(subject: str) -> str:
    """Import the trainer in a rank, and return the name of its module."""
    return grpo.trainer_class(subject).__module__


def test_single(subject: str, judge: Judge, launcher: Launcher) -> None:
    def measure() -> Finding:
        result = launcher(import_trainer, subject, strategy="single")
        return Finding(Verdict.OK, {"module": result.values[0]})

    judge(measure, subject=subject, strategy="single")
