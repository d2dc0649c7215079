"""vLLM as a server: one that is lost, late or of another release, and answers that cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import vllm_training
from . import verdicts
from .trainings import measurements

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

pytestmark = pytest.mark.vllm


@pytest.mark.on_demand
@pytest.mark.parametrize(("trainer", "label"), measurements("server-loss"))
def test_loss(trainer: str, label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """A training goes on after its vLLM server was lost.

    Right is: where the server has ended, or was restarted, every rank ends with an error, and no completion comes from
    other weights than the policy's. One that is late is waited for, and all is as without that. Part of a sweep with
    ``--issue`` alone: each training costs a server, and a minute in which TRL's client asks again.
    """

    def measure() -> Finding:
        training = vllm_trainings(subject, label, trainer)
        is_late = vllm_training.is_late(label.partition("-")[2])
        return verdicts.late(training, label, judge.issue.id) if is_late else verdicts.loss(training, label)

    judge(measure, subject=subject, strategy=label)


@pytest.mark.on_demand
@pytest.mark.parametrize(("trainer", "label"), measurements("server-release"))
def test_release(trainer: str, label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """The vLLM server that GRPO asks is of another release of TRL.

    Right is: as for ``grpo-vllm-server-weights`` and ``grpo-vllm-batches``. An error is not right either, but is seen.
    Part of no sweep, since the other releases have to be provided: ``nox -s server_releases``.
    """
    judge(
        lambda: verdicts.released(vllm_trainings(subject, label, trainer), label, judge.issue.id),
        subject=subject,
        strategy=label,
    )


@pytest.mark.parametrize(("trainer", "label"), measurements("server-logprobs"))
def test_log_probabilities(trainer: str, label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """What a server answers to prompts with images cannot be read."""
    issue = judge.issue.id
    judge(
        lambda: verdicts.answers(vllm_trainings(subject, label, trainer), label, issue), subject=subject, strategy=label
    )
