"""Known issue ``trl-training-arguments``: importing TRL's ``GRPOConfig`` breaks every plain ``TrainingArguments``.

Right is: ``transformers.TrainingArguments`` can be made after ``trl.GRPOConfig`` was imported. The corrected trainer
imports ``GRPOConfig`` as any user does, and does not touch Transformers: there is upstream alone to be judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher

pytestmark = pytest.mark.known_issue("trl-training-arguments")


@pytest.mark.parametrize("subject", ["upstream"])
def test_plain_training_arguments(subject: str, judge: Judge, launcher: Launcher) -> None:
    """No trainer of ours takes part, so there is nothing to correct."""

    def measure() -> Finding:
        (steps,) = launcher(make_training_arguments, strategy="single").values
        return Finding(Verdict.OK if steps == 3 else Verdict.SILENT, {"max_steps": steps})

    judge(measure, subject=subject, strategy="single")


def make_training_arguments() -> int:
    import tempfile

    from transformers import TrainingArguments
    from trl.trainer.grpo_config import GRPOConfig

    assert issubclass(GRPOConfig, TrainingArguments)
    return int(TrainingArguments(tempfile.mkdtemp(prefix="trlcompat-"), max_steps=3, report_to="none").max_steps)
