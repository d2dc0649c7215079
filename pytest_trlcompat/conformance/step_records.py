"""What every recording has of the steps of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["RecordedSteps", "StepRecord"]


@dataclass
class StepRecord:
    """One step of the optimizer.

    Attributes:
        micro_batches: how many there were up to and including this step.
        gradients: of trained parameters, after clipping; ``None`` where the strategy does not show them.
        weights: of trained parameters, after the step.
    """

    micro_batches: int
    gradients: dict[str, torch.Tensor] | None
    weights: dict[str, torch.Tensor]


class RecordedSteps(Protocol):
    """
    Attributes:
        steps: made so far.
    """

    steps: list[StepRecord]

    @property
    def trained_on(self) -> int:
        """How many micro-batches were trained on until now."""
