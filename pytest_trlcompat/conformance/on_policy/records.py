"""The records of a training with PPO or with the legacy RLOO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["OnPolicyRecording", "OnPolicyStep"]


@dataclass
class OnPolicyStep:
    """One step of the optimizer.

    Attributes:
        micro_batches: how many there were up to and including this step.
        gradients: as the optimizer got them; ``weights``: after the step.
    """

    micro_batches: int
    learning_rate: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@dataclass
class OnPolicyRecording:
    """A training on one rank.

    Attributes:
        arguments: fields of the config as the trainer has them.
        rank: the rank that recorded it.
        rows: query and response of each row, without padding, in the order of batches.
        seen: by quantity, the tensors of each batch: ``(batch, tensor)``.
        micro_batches: the batch, and the tokens of each row without padding.
        checkpoints: the numbers of batches after which there was a checkpoint.
        drawn: for each call of ``generate``, the arguments that decide how tokens are drawn, by name.
        asked: fields of the config as the user wrote them, which ``arguments`` must still have.
        prompts: their number in the dataset, where it is known.
        collated: how many rows the user's own collator has collated; ``None`` without such a collator.
    """

    arguments: dict[str, Any]
    rank: int = 0
    rows: list[tuple[list[int], list[int]]] = field(default_factory=list)
    seen: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    micro_batches: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    steps: list[OnPolicyStep] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    drawn: list[dict[str, Any]] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)
    prompts: int = 0
    collated: int | None = None

    @property
    def batch(self) -> int:
        """The number of the current batch."""
        return (len(self.rows) - 1) // int(self.arguments["local_batch_size"])

    def see(self, name: str, values: torch.Tensor) -> None:
        self.seen.setdefault(name, []).append((self.batch, values.detach().cpu().clone()))

    def of_batch(self, name: str, batch: int) -> torch.Tensor | None:
        """All rows of a batch, or ``None`` where this release does not show it."""
        import torch

        parts = [values for number, values in self.seen.get(name, []) if number == batch]
        if not parts:
            return None
        if parts[0].dim() == 1:
            return torch.cat(parts)
        width = max(part.shape[-1] for part in parts)
        return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in parts])
