"""The quantities of a PPO training, in the order in which its steps make them: of the reference and of a recording.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_trlcompat.conformance.comparison import Quantity
from pytest_trlcompat.conformance.ppo.records import PPORecording

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference

__all__ = ["expected_quantities", "recorded_quantities"]


def expected_quantities(steps: Sequence[reference.PPOStep], logging_steps: int) -> Iterator[Quantity]:
    """Everything that a recording can show, in the order in which steps make it."""
    import torch

    for batch, step in enumerate(steps):
        made, place = step.experience, f"batch {batch}"
        mask, states = made.tokens.completion_mask, made.step_mask
        yield Quantity("mask", place, mask.double(), torch.ones_like(mask))
        yield Quantity("logprobs", place, made.logprobs, mask)
        yield Quantity("reference_logprobs", place, made.reference_logprobs, mask)
        yield Quantity("values", place, made.values, states)
        yield Quantity("scores", place, made.scores)
        yield Quantity("rewards", place, made.rewards, states)
        yield Quantity("whitened_rewards", place, made.whitened_rewards, states)
        yield Quantity("estimates", place, made.returns - made.values, mask)
        yield Quantity("advantages", place, made.advantages, mask)
        counts: dict[int, int] = {}
        yield Quantity("steps", place, torch.tensor([float(len(step.optimizer_steps))]))
        for number, update in enumerate(step.optimizer_steps):
            for one in update.micro_batches:
                count = counts[one.rank] = counts.get(one.rank, -1) + 1
                yield Quantity("new_logprobs", f"{place}, rank {one.rank}, micro-batch {count}", one.logprobs, one.mask)
            where = f"{place}, step {number}"
            yield Quantity("learning_rate", where, torch.tensor([update.learning_rate], dtype=torch.float64))
            for name, tensors in (("gradients", update.clipped_gradients), ("weights", update.weights)):
                for key, values in tensors.items():
                    yield Quantity(f"{name}[{key.replace('.inner.', '.')}]", where, values)
        if logging_steps == 1:  # what a line says of several batches is not documented
            for name, value in step.logs.items():
                yield Quantity(f"logs[{name}]", place, torch.tensor([value], dtype=torch.float64))
    yield Quantity("logs[number of lines]", "training", torch.tensor([float(len(steps) // logging_steps)]))


def recorded_quantities(recordings: Sequence[PPORecording]) -> dict[tuple[str, str], torch.Tensor]:
    """The same of a recording, as far as this release shows it, by stage and place."""
    import torch

    found: dict[tuple[str, str], torch.Tensor] = {}
    main = recordings[0]
    batches = len(main.rows) // int(main.arguments["local_batch_size"])
    ends = [sum(number <= batch for number, _ in main.micro_batches) for batch in range(batches)]
    for batch in range(batches):
        place = f"batch {batch}"
        for name in ("mask", "logprobs", "reference_logprobs", "values", "scores", "rewards", "whitened_rewards"):
            _gather(found, name, place, [one.of_batch(name, batch) for one in recordings])
        for name in ("estimates", "advantages"):
            _gather(found, name, place, [one.of_batch(name, batch) for one in recordings])
        for rank, one in enumerate(recordings):
            own = [each for number, each in one.seen.get("new_logprobs", []) if number == batch]
            for count, values in enumerate(own):
                found["new_logprobs", f"{place}, rank {rank}, micro-batch {count}"] = values
        start = ends[batch - 1] if batch else 0
        steps = [each for each in main.steps if start < each.micro_batches <= ends[batch]]
        found["steps", place] = torch.tensor([float(len(steps))])
        for number, step in enumerate(steps):
            where = f"{place}, step {number}"
            found["learning_rate", where] = torch.tensor([step.learning_rate], dtype=torch.float64)
            for name, tensors in (("gradients", step.gradients), ("weights", step.weights)):
                for key, values in tensors.items():
                    found[f"{name}[{key}]", where] = values
    for batch, entry in enumerate(main.logs):
        for name, value in entry.items():
            found[f"logs[{name}]", f"batch {batch}"] = torch.tensor([value], dtype=torch.float64)
    found["logs[number of lines]", "training"] = torch.tensor([float(len(main.logs))])
    return found


def _gather(
    found: dict[tuple[str, str], torch.Tensor], name: str, place: str, parts: Sequence[torch.Tensor | None]
) -> None:
    """The rows of all ranks, as wide as the widest."""
    import torch

    present = [each for each in parts if each is not None]
    if len(present) == len(parts):
        width = max(each.shape[-1] for each in present)
        if present[0].dim() > 1:
            present = [torch.nn.functional.pad(each.float(), (0, width - each.shape[-1])) for each in present]
        found[name, place] = torch.cat(present)
