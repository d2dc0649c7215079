"""Quantities that PPO and the legacy RLOO have in common, expected and recorded.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_trlcompat.conformance.comparison import Difference, Quantity
from pytest_trlcompat.conformance.grpo.quantities import is_drawn_so
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording

__all__ = ["DRAWN", "before_steps", "expected_steps", "recorded_batches", "recorded_logs"]

DRAWN = ("do_sample", "max_new_tokens", "repetition_penalty", "temperature", "top_k", "top_p")
"""Arguments of generation that decide how tokens are drawn."""
_NEAR = 1e-6
"""Allowed difference of a temperature: trainers add 1e-7, so that none is 0."""


def before_steps(recording: OnPolicyRecording) -> Iterator[Difference]:
    """What differs before a model has computed anything: the user's arguments, and how tokens are drawn.

    Importance ratios ask for responses that are drawn from the very distribution whose log-probabilities are taken: at
    the config's temperature, and with no token cut off or penalised, whatever the model's own generation config says.
    """
    arguments = recording.arguments
    for name, expected in recording.asked.items():
        if arguments.get(name) != expected:
            yield Difference(f"config[{name}]", "built", [expected], [arguments.get(name)], math.inf, 0.0)
    if recording.collated == 0:
        yield Difference("data_collator", "training", ["batches"], ["none"], math.inf, 0.0)
    drawn = {
        "do_sample": True,
        "max_new_tokens": arguments["response_length"],
        "repetition_penalty": 1.0,
        "temperature": arguments["temperature"],
        "top_k": 0,
        "top_p": 1.0,
    }
    for name, expected in drawn.items():
        calls = [(number, call[name]) for number, call in enumerate(recording.drawn)]
        other = [(number, value) for number, value in calls if not is_drawn_so(name, value, expected, _NEAR)]
        for number, value in other[:1]:  # all calls have the same arguments
            yield Difference(f"generation[{name}]", f"call {number}", [expected], [value], math.inf, 0.0)
    stop: Any = arguments.get("stop_token_id")
    if stop is None and arguments.get("stop_token") == "eos":
        stop = 1
    responses = [response for _, response in recording.rows]
    beyond = [(row, response) for row, response in enumerate(responses) if stop in response[:-1]]
    for row, response in beyond[:1]:
        begun = response[: response.index(int(stop or 0)) + 1]
        yield Difference("generation[stop_token]", f"row {row}", begun, response, math.inf, 0.0)


def expected_steps(steps: Sequence[Any], place: str, by_micro_batch: Sequence[str]) -> Iterator[Quantity]:
    """The expected quantities of the optimizer steps of a batch.

    Args:
        steps: the reference's records.
        place: names the batch.
        by_micro_batch: attributes of micro-batches, one number for each row.
    """
    import torch

    counts: dict[int, int] = {}
    yield Quantity("steps", place, torch.tensor([float(len(steps))]))
    for number, update in enumerate(steps):
        for micro_batch in update.micro_batches:
            count = counts[micro_batch.rank] = counts.get(micro_batch.rank, -1) + 1
            for name in by_micro_batch:
                where = f"{place}, rank {micro_batch.rank}, micro-batch {count}"
                values = getattr(micro_batch, name)
                yield Quantity(name, where, values, micro_batch.mask if values.dim() > 1 else None)
        where = f"{place}, step {number}"
        yield Quantity("learning_rate", where, torch.tensor([update.learning_rate], dtype=torch.float64))
        for name, tensors in (("gradients", update.clipped_gradients), ("weights", update.weights)):
            for key, tensor in tensors.items():
                # `expected.numbers` has the classifier one module deeper than the trainer.
                yield Quantity(f"{name}[{key.replace('.inner.', '.')}]", where, tensor)


def recorded_batches(
    recordings: Sequence[OnPolicyRecording], by_batch: Sequence[str], by_micro_batch: Sequence[str]
) -> dict[tuple[str, str], Any]:
    """The recorded quantities of each batch and of its optimizer steps, as far as this release shows them.

    Args:
        by_batch: names of quantities with a value for each row of a batch.
        by_micro_batch: names of quantities of micro-batches.
    """
    import torch

    recorded: dict[tuple[str, str], Any] = {}
    main = recordings[0]
    batches = len(main.rows) // int(main.arguments["local_batch_size"])
    ends = [sum(number <= batch for number, _ in main.micro_batches) for batch in range(batches)]
    for batch in range(batches):
        place = f"batch {batch}"
        for name in by_batch:
            _gather(recorded, name, place, [recording.of_batch(name, batch) for recording in recordings])
        for rank, recording in enumerate(recordings):
            for name in by_micro_batch:
                batch_values = [values for number, values in recording.seen.get(name, []) if number == batch]
                for count, values in enumerate(batch_values):
                    recorded[name, f"{place}, rank {rank}, micro-batch {count}"] = values
        start = ends[batch - 1] if batch else 0
        steps = [step for step in main.steps if start < step.micro_batches <= ends[batch]]
        recorded["steps", place] = torch.tensor([float(len(steps))])
        for number, step in enumerate(steps):
            where = f"{place}, step {number}"
            recorded["learning_rate", where] = torch.tensor([step.learning_rate], dtype=torch.float64)
            for name, tensors in (("gradients", step.gradients or {}), ("weights", step.weights)):
                for key, values in tensors.items():
                    recorded[f"{name}[{key}]", where] = values
    return recorded


def recorded_logs(recording: OnPolicyRecording) -> dict[tuple[str, str], Any]:
    """What the first rank logged."""
    import torch

    recorded: dict[tuple[str, str], Any] = {}
    for batch, entry in enumerate(recording.logs):
        for name, value in entry.items():
            recorded[f"logs[{name}]", f"batch {batch}"] = torch.tensor([value], dtype=torch.float64)
    recorded["logs[number of lines]", "training"] = torch.tensor([float(len(recording.logs))])
    return recorded


def _gather(recorded: dict[tuple[str, str], Any], name: str, place: str, parts: Sequence[Any]) -> None:
    """Join the rows of all ranks, padded to the same width."""
    import torch

    present = [part for part in parts if part is not None]
    if len(present) == len(parts):
        width = max(part.shape[-1] for part in present)
        if present[0].dim() > 1:
            present = [torch.nn.functional.pad(part.float(), (0, width - part.shape[-1])) for part in present]
        recorded[name, place] = torch.cat(present)
