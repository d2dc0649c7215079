"""The inputs of a recorded training as the reference takes them: settings, episodes, layouts, and models.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_trlcompat.conformance.comparison import StepCountMismatch
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference

__all__ = ["episodes", "layouts", "numbers", "settings_of"]

Settings = TypeVar("Settings", bound="reference.OnPolicySettings")


def settings_of(
    recordings: Sequence[OnPolicyRecording], conventions: Conventions, kind: type[Settings], undecided: Any
) -> Settings:
    """The reference's settings for the arguments of all ranks.

    Args:
        conventions: of the trainer's release.
        kind: the class of the settings.
        undecided: the class of what documentation leaves open.
    """
    arguments: Mapping[str, Any] = recordings[0].arguments
    names = {field.name for field in fields(kind)}
    chosen = {**conventions.absent, **{name: value for name, value in arguments.items() if name in names}}
    for name in ("lr_scheduler_type", "optim"):
        # Transformers makes enumerations of these texts.
        chosen[name] = str(getattr(arguments[name], "value", arguments[name]))
    if chosen.get("warmup_steps") == 0:
        # The reference has one setting for both: below 1 it is the part of the steps that warmup_ratio names.
        chosen["warmup_steps"] = arguments.get("warmup_ratio") or 0
    micro_batch = int(arguments["per_device_train_batch_size"])
    mini_batch = int(arguments["local_batch_size"]) // int(arguments["num_mini_batches"])
    # The reference's setting is the number of micro-batches of a mini-batch.
    chosen["gradient_accumulation_steps"] = max(1, mini_batch // micro_batch)
    fixed = {"world_size": len(recordings), "pad_token_id": 0, "eos_token_id": 1}
    return kind(**{**chosen, **fixed, "undecided": undecided(**conventions.undecided)})


def episodes(recordings: Sequence[OnPolicyRecording]) -> list[reference.Episodes]:
    """Queries and responses of each batch, of all ranks.

    Raises:
        StepCountMismatch: there is no batch.
    """
    from pytest_trlcompat import reference

    size = int(recordings[0].arguments["local_batch_size"])
    if len(recordings[0].rows) < size:
        raise StepCountMismatch("there was no batch")
    batches = []
    for batch in range(len(recordings[0].rows) // size):
        rows = [row for recording in recordings for row in recording.rows[batch * size : (batch + 1) * size]]
        batches.append(reference.Episodes([query for query, _ in rows], [response for _, response in rows]))
    return batches


def layouts(
    recordings: Sequence[OnPolicyRecording], batches: int, settings: reference.OnPolicySettings
) -> list[list[list[list[list[list[int]]]]]]:
    """Rows of each batch by epoch, mini-batch, micro-batch and rank, as the trainer dealt them.

    Raises:
        StepCountMismatch: the micro-batches of a batch are not its rows.
    """
    size = int(recordings[0].arguments["local_batch_size"])
    return [_layout(recordings, batch, size, settings) for batch in range(batches)]


def _layout(
    recordings: Sequence[OnPolicyRecording], batch: int, size: int, settings: reference.OnPolicySettings
) -> list[list[list[list[list[int]]]]]:
    epochs, minis, micros = settings.num_ppo_epochs, settings.num_mini_batches, settings.gradient_accumulation_steps
    ranks = []
    for rank, recording in enumerate(recordings):
        dealt = [rows for number, rows in recording.micro_batches if number == batch]
        if len(dealt) != epochs * minis * micros:
            raise StepCountMismatch(
                f"batch {batch} was trained on in {len(dealt)} micro-batches, not {epochs} x {minis} x {micros}"
            )
        sampled = [query + response for query, response in recording.rows[batch * size : (batch + 1) * size]]
        placed = []
        for start in range(0, len(dealt), minis * micros):
            unused: list[Any] = [*sampled]
            for rows in dealt[start : start + minis * micros]:
                places = []
                for row in rows:
                    if row not in unused:
                        raise StepCountMismatch(
                            f"batch {batch}: a micro-batch has a row that was not sampled or used: {row}"
                        )
                    places.append(unused.index(row))
                    # Rows may be equal: each sampled row is found once in an epoch.
                    unused[places[-1]] = None
                placed.append([rank * size + place for place in places])
        ranks.append(placed)
    numbers = iter(range(epochs * minis * micros))
    flat = [[rank[number] for rank in ranks] for number in numbers]
    mini_batches = [flat[start : start + micros] for start in range(0, len(flat), micros)]
    return [mini_batches[start : start + minis] for start in range(0, len(mini_batches), minis)]


def numbers(model: Any) -> torch.nn.Module:
    """A module that gives, for each token, the single output of a classifier with one label."""
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
