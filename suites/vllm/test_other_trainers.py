"""What is known of vLLM in TRL's other trainers that generate with it: RLOO and distillation.

Each of their issues is judged as GRPO's of the same name; which labels are measured stands in the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.plugin.judging import Finding, Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTraining, VLLMTrainings

NAMES = {"rloo": "RLOO", "distillation": "Distillation"}


def _judgement(issue: str, name: str) -> Callable[[VLLMTraining, str], Finding]:
    what = issue.partition("-vllm-")[2]
    if what.endswith("weights"):
        return lambda training, label: verdicts.weights(training, label, issue)
    if what == "image-token":
        return lambda training, label: verdicts.image_token(training, label, issue, name)
    if what in ("batches", "images"):
        return lambda training, label: verdicts.batches(training, label, name)
    assert what == "merge-drift", f"there is no judgement for {issue}"
    return verdicts.policy


def _measurements() -> Iterator[Any]:
    for issue in known_issues.load().values():
        trainer, vllm, _ = issue.id.partition("-vllm-")
        if vllm and trainer in NAMES:
            marks = (pytest.mark.known_issue(issue.id), pytest.mark.vllm)
            for label in issue.strategies:
                yield pytest.param(issue.id, NAMES[trainer], label, marks=marks, id=f"{issue.id}-{label}")


@pytest.mark.parametrize(("issue", "name", "label"), [*_measurements()])
def test_trainer(issue: str, name: str, label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judged = _judgement(issue, name)
    judge(lambda: judged(vllm_trainings(subject, label, name), label), subject=subject, strategy=label)
