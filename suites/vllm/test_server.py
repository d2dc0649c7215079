"""vLLM as a server: one that is lost, late or of another release, and answers that cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import vllm_training
from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

pytestmark = pytest.mark.vllm


@pytest.mark.known_issue("grpo-vllm-server-loss")
@pytest.mark.on_demand
@pytest.mark.parametrize("label", load()["grpo-vllm-server-loss"].strategies)
def test_loss(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """A training goes on after its vLLM server was lost.

    Right is: where the server has ended, or was restarted, every rank ends with an error, and no completion comes from
    other weights than the policy's. One that is late is waited for, and all is as without that. Part of a sweep with
    ``--issue`` alone: each training costs a server, and a minute in which TRL's client asks again.
    """

    def measure() -> Finding:
        training = vllm_trainings(subject, label)
        is_late = vllm_training.is_late(label.partition("-")[2])
        return verdicts.late(training, label, judge.issue.id) if is_late else verdicts.loss(training, label)

    judge(measure, subject=subject, strategy=label)


@pytest.mark.known_issue("grpo-vllm-server-release")
@pytest.mark.on_demand
@pytest.mark.parametrize("label", load()["grpo-vllm-server-release"].strategies)
def test_release(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """The vLLM server that GRPO asks is of another release of TRL.

    Right is: as for ``grpo-vllm-server-weights`` and ``grpo-vllm-batches``. An error is not right either, but is seen.
    Part of no sweep, since the other releases have to be provided: ``nox -s server_releases``.
    """
    judge(
        lambda: verdicts.released(vllm_trainings(subject, label), label, judge.issue.id),
        subject=subject,
        strategy=label,
    )


@pytest.mark.known_issue("grpo-vllm-server-logprobs")
@pytest.mark.parametrize("label", load()["grpo-vllm-server-logprobs"].strategies)
def test_log_probabilities(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """What a server answers to prompts with images cannot be read."""
    issue = judge.issue.id
    judge(lambda: verdicts.answers(vllm_trainings(subject, label), label, issue), subject=subject, strategy=label)
