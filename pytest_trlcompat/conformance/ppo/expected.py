"""Compute with the reference what a recorded PPO training must give, from the same queries and responses.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.on_policy.expected import episodes, layouts, numbers, settings_of
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference

__all__ = ["Untrained", "computed"]


@dataclass(frozen=True)
class Untrained:
    """The models as they were before the training.

    Attributes:
        value_model, reward_model: classifiers with one label.
    """

    policy: torch.nn.Module
    value_model: torch.nn.Module
    reward_model: torch.nn.Module
    reference_model: torch.nn.Module


def computed(
    recordings: Sequence[OnPolicyRecording], models: Untrained, conventions: Conventions
) -> tuple[reference.PPOStep, ...]:
    """What the reference gives for the queries and responses of all ranks.

    Args:
        conventions: of the trainer's release.

    Raises:
        StepCountMismatch: there is no batch, or the micro-batches of one are not its rows.
    """
    from pytest_trlcompat import reference

    settings = settings_of(recordings, conventions, reference.PPOSettings, reference.PPOUndecided)
    batches = episodes(recordings)
    return reference.ppo_train(
        models.policy.eval(),
        numbers(models.value_model),
        batches,
        settings,
        reward_model=numbers(models.reward_model),
        reference_model=models.reference_model.eval(),
        layouts=layouts(recordings, len(batches), settings),
    )
