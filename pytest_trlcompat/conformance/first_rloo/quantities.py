"""The quantities of a training of the legacy RLOO, in the order in which its steps compute them.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_trlcompat.conformance.comparison import FLOOR, Quantity
from pytest_trlcompat.conformance.on_policy.quantities import expected_steps, recorded_batches, recorded_logs
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference

__all__ = ["BY_BATCH", "BY_MICRO_BATCH", "expected_quantities", "recorded_quantities"]

BY_BATCH = ("mask", "logprobs", "reference_logprobs", "scores", "kl", "rewards", "baselines", "advantages")
"""Quantities of each batch."""
BY_MICRO_BATCH = ("ratios", "losses")


def expected_quantities(
    steps: Sequence[reference.FirstRLOOStep],
    logging_steps: int,
    documented_rows: int,
    epoch: float | None,
    saved_each: int = 0,
) -> Iterator[Quantity]:
    """Everything that a recording can show, in the order in which steps compute it.

    Args:
        saved_each: number of batches, each of one update, between checkpoints; 0 without checkpoints, or where a batch
            has several updates: it is not documented which of them is a step.
        epoch: the part of the dataset's prompts in a batch, with ``rloo_k`` rows for each; ``None``: not compared.
        documented_rows: of a batch on one rank, "``per_device_train_batch_size`` * ``gradient_accumulation_steps``".
    """
    import torch

    yield Quantity("data[rows of a batch]", "training", torch.tensor([float(documented_rows)]))
    for batch, step in enumerate(steps):
        experience, place = step.experience, f"batch {batch}"
        mask, credit = experience.tokens.completion_mask, experience.credit
        yield Quantity("mask", place, mask.double(), torch.ones_like(mask))
        yield Quantity("logprobs", place, experience.logprobs, mask)
        yield Quantity("reference_logprobs", place, experience.reference_logprobs, mask)
        yield Quantity("scores", place, experience.scores)
        yield Quantity("kl", place, experience.kl, mask)
        yield Quantity("rewards", place, credit.rewards)
        yield Quantity("baselines", place, credit.baselines)
        yield Quantity("advantages", place, credit.advantages)
        yield from expected_steps(step.optimizer_steps, place, BY_MICRO_BATCH)
        # It is not documented what a line says of several batches.
        if logging_steps == 1:
            if epoch is not None:
                yield Quantity("logs[epoch]", place, torch.tensor([(batch + 1) * epoch], dtype=torch.float64))
            for name, value in step.logs.items():
                # At first losses are negative advantages, whose sum is 0 up to rounding.
                rounding = _largest_loss(step) * FLOOR if name == "loss/policy_avg" else 0.0
                yield Quantity(f"logs[{name}]", place, torch.tensor([value], dtype=torch.float64), rounding=rounding)
    # One at the end is not compared: not all releases of Transformers save it.
    if saved_each:
        places = [float(step) for step in range(1, len(steps)) if step % saved_each == 0]
        yield Quantity("checkpoints", "training", torch.tensor(places))
    yield Quantity("logs[number of lines]", "training", torch.tensor([float(len(steps) // logging_steps)]))


def _largest_loss(step: reference.FirstRLOOStep) -> float:
    return max(
        float(micro_batch.losses.abs().max()) for update in step.optimizer_steps for micro_batch in update.micro_batches
    )


def recorded_quantities(recordings: Sequence[OnPolicyRecording]) -> dict[tuple[str, str], torch.Tensor]:
    """The same quantities of a recording, by stage and place."""
    import torch

    rows = float(recordings[0].arguments["local_batch_size"])
    batches = len(recordings[0].rows) // int(rows)
    return {
        ("data[rows of a batch]", "training"): torch.tensor([rows]),
        **recorded_batches(recordings, BY_BATCH, BY_MICRO_BATCH),
        ("checkpoints", "training"): torch.tensor(
            [float(step) for step in recordings[0].checkpoints if step < batches]
        ),
        **recorded_logs(recordings[0]),
    }
