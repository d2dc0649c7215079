"""The quantities of a PPO training, expected and recorded, in the order in which its steps compute them.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_trlcompat.conformance.comparison import Quantity
from pytest_trlcompat.conformance.on_policy.quantities import expected_steps, recorded_batches, recorded_logs
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference

__all__ = ["expected_quantities", "recorded_quantities"]

_BY_BATCH = (
    *("mask", "logprobs", "reference_logprobs", "values", "scores", "rewards", "whitened_rewards"),
    *("estimates", "advantages"),
)


def expected_quantities(
    steps: Sequence[reference.PPOStep], logging_steps: int, documented_rows: int | None
) -> Iterator[Quantity]:
    """Everything that a recording can show, in the order in which steps compute it.

    Args:
        documented_rows: of a batch on one rank, "``per_device_train_batch_size`` * ``gradient_accumulation_steps``";
            ``None``: it is not compared.
    """
    import torch

    if documented_rows is not None:
        yield Quantity("data[rows of a batch]", "training", torch.tensor([float(documented_rows)]))
    for batch, step in enumerate(steps):
        experience, place = step.experience, f"batch {batch}"
        mask, states = experience.tokens.completion_mask, experience.step_mask
        yield Quantity("mask", place, mask.double(), torch.ones_like(mask))
        yield Quantity("logprobs", place, experience.logprobs, mask)
        yield Quantity("reference_logprobs", place, experience.reference_logprobs, mask)
        yield Quantity("values", place, experience.values, states)
        yield Quantity("scores", place, experience.scores)
        yield Quantity("rewards", place, experience.rewards, states)
        yield Quantity("whitened_rewards", place, experience.whitened_rewards, states)
        yield Quantity("estimates", place, experience.returns - experience.values, mask)
        yield Quantity("advantages", place, experience.advantages, mask)
        for quantity in expected_steps(step.optimizer_steps, place, ("logprobs",)):
            yield dataclasses.replace(quantity, stage="new_logprobs") if quantity.stage == "logprobs" else quantity
        # It is not documented what a line says of several batches.
        if logging_steps == 1:
            for name, value in step.logs.items():
                yield Quantity(f"logs[{name}]", place, torch.tensor([value], dtype=torch.float64))
    yield Quantity("logs[number of lines]", "training", torch.tensor([float(len(steps) // logging_steps)]))


def recorded_quantities(recordings: Sequence[OnPolicyRecording]) -> dict[tuple[str, str], torch.Tensor]:
    """The same quantities of a recording, as far as this release shows them, by stage and place."""
    import torch

    return {
        ("data[rows of a batch]", "training"): torch.tensor([float(recordings[0].arguments["local_batch_size"])]),
        **recorded_batches(recordings, _BY_BATCH, ("new_logprobs",)),
        **recorded_logs(recordings[0]),
    }
