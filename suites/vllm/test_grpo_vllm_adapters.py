"""Known issues of adapters that are no plain LoRA, or that part tied embeddings: how their weights reach vLLM.

Right is: as for ``grpo-vllm-weights``. The labels of each stand in the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.plugin.judging import Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

MARKS = (
    pytest.mark.known_issue("grpo-vllm-dora"),
    pytest.mark.known_issue("grpo-vllm-tied-embeddings"),
    pytest.mark.known_issue("grpo-vllm-trained-tokens"),
)


def _measurements() -> Iterator[Any]:
    for mark in MARKS:
        (issue,) = mark.args
        for label in known_issues.load()[issue].strategies:
            yield pytest.param(issue, label, marks=(mark, pytest.mark.vllm), id=f"{issue}-{label}")


@pytest.mark.parametrize(("issue", "label"), [*_measurements()])
def test_weights(issue: str, label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: verdicts.weights(vllm_trainings(subject, label), label, issue), subject=subject, strategy=label)
