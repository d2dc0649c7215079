"""What a recorded PPO training must give, computed by the reference from the same queries and responses.

Runs inside a rank, or wherever torch is; imports nothing else of the stack.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.comparison import OutOfStep
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.ppo.records import PPORecording

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference

__all__ = ["Untrained", "computed"]


@dataclass(frozen=True)
class Untrained:
    """The models as they were before the training.

    Attributes:
        value_model, reward_model: with one label.
    """

    policy: torch.nn.Module
    value_model: torch.nn.Module
    reward_model: torch.nn.Module
    reference_model: torch.nn.Module


def computed(
    recordings: Sequence[PPORecording], models: Untrained, conventions: Conventions
) -> tuple[reference.PPOStep, ...]:
    """What the reference gives for the queries and responses of all ranks.

    Args:
        conventions: of the trainer's release.

    Raises:
        OutOfStep: there is no batch, or the micro-batches of one are not its rows.
    """
    from pytest_trlcompat import reference

    arguments = recordings[0].arguments
    size = int(arguments["local_batch_size"])
    settings = _settings(arguments, conventions, len(recordings))
    batches, layouts = [], []
    if len(recordings[0].rows) < size:
        raise OutOfStep("there was no batch")
    for batch in range(len(recordings[0].rows) // size):
        rows = [row for one in recordings for row in one.rows[batch * size : (batch + 1) * size]]
        batches.append(reference.Episodes([query for query, _ in rows], [response for _, response in rows]))
        layouts.append(_layout(recordings, batch, size, settings))
    return reference.ppo_train(
        models.policy.eval(),
        _numbers(models.value_model),
        batches,
        settings,
        reward_model=_numbers(models.reward_model),
        reference_model=models.reference_model.eval(),
        layouts=layouts,
    )


def _settings(arguments: Mapping[str, Any], conventions: Conventions, world_size: int) -> reference.PPOSettings:
    from pytest_trlcompat import reference

    names = {each.name for each in fields(reference.PPOSettings)}
    chosen = {name: value for name, value in arguments.items() if name in names}
    for name in ("lr_scheduler_type", "optim"):
        chosen[name] = str(getattr(arguments[name], "value", arguments[name]))
    if chosen.get("warmup_steps") == 0:
        chosen["warmup_steps"] = arguments.get("warmup_ratio") or 0
    micro_batch = int(arguments["per_device_train_batch_size"])
    mini_batch = int(arguments["local_batch_size"]) // int(arguments["num_mini_batches"])
    chosen["gradient_accumulation_steps"] = max(1, mini_batch // micro_batch)
    undecided = reference.PPOUndecided(**conventions.undecided)
    return reference.PPOSettings(
        **{**chosen, "world_size": world_size, "pad_token_id": 0, "eos_token_id": 1, "undecided": undecided}
    )


def _layout(
    recordings: Sequence[PPORecording], batch: int, size: int, settings: reference.PPOSettings
) -> list[list[list[list[list[int]]]]]:
    epochs, minis, micros = settings.num_ppo_epochs, settings.num_mini_batches, settings.gradient_accumulation_steps
    ranks = []
    for rank, one in enumerate(recordings):
        own = [rows for number, rows in one.micro_batches if number == batch]
        if len(own) != epochs * minis * micros:
            raise OutOfStep(
                f"batch {batch} was trained on in {len(own)} micro-batches, not {epochs} x {minis} x {micros}"
            )
        sampled = [query + response for query, response in one.rows[batch * size : (batch + 1) * size]]
        placed = []
        for start in range(0, len(own), minis * micros):
            unused: list[Any] = [*sampled]
            for rows in own[start : start + minis * micros]:
                places = []
                for row in rows:
                    if row not in unused:
                        raise OutOfStep(f"batch {batch}: a micro-batch has a row that was not sampled or used: {row}")
                    places.append(unused.index(row))
                    unused[places[-1]] = None
                placed.append([rank * size + place for place in places])
        ranks.append(placed)
    numbers = iter(range(epochs * minis * micros))
    flat = [[rank[number] for rank in ranks] for number in numbers]
    each = [flat[start : start + micros] for start in range(0, len(flat), micros)]
    return [each[start : start + minis] for start in range(0, len(each), minis)]


def _numbers(model: Any) -> torch.nn.Module:
    """A model with one label as one that gives a number for each token."""
    import torch

    class Numbers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(model).eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            backbone = getattr(self.inner, self.inner.base_model_prefix)
            output = backbone(input_ids=input_ids, attention_mask=attention_mask)
            numbers: torch.Tensor = self.inner.score(output.last_hidden_state)
            return numbers

    return Numbers()
