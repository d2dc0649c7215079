"""One training per subject and strategy, shared by the suites that judge it, and how they compare numbers.

Runs in the test process: weights are compared as the bytes that a rank sent or saved.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat import _location
from pytest_trlcompat.plugin.judging import Absent

from ..in_rank import sharding
from ..launches import distinct

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

__all__ = [
    "NO_SHARD",
    "WORLD_SIZE",
    "Training",
    "Trainings",
    "built_as_asked",
    "greatest_difference",
    "read_safetensors",
]

WORLD_SIZE = 2
NO_SHARD = "fsdp1-no_shard"
# With values that the Trainer is to fill in: grpo-deepspeed-config is that they reach DeepSpeed as texts.
_SGD = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
# A warm-up between two equal rates is a constant one.
_CONSTANT = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": sharding.LEARNING_RATE, "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    NO_SHARD: {"sharding_strategy": "NO_SHARD"},
    **{f"zero{stage}-optimizer": _SGD for stage in (2, 3)},
    **{f"zero{stage}-scheduler": {**_SGD, "scheduler": _CONSTANT} for stage in (2, 3)},
}
"""The DeepSpeed configs ask for the optimizer and the learning rates that the other trainings have."""
_ACCUMULATION: Mapping[str, int] = {NO_SHARD: 2}
"""Steps of gradient accumulation. ``NO_SHARD`` is wrong with more than one only."""
_FSDP = (sharding.EVALUATION, sharding.SAVING)
_MEASURED: Mapping[str, Sequence[str]] = {
    "single": (sharding.EVALUATION, sharding.EVALUATION_OF_PART, sharding.EVALUATION_IN_BATCHES),
    "ddp": (sharding.EVALUATION_OF_PART,),
    "fsdp1": _FSDP,
    NO_SHARD: _FSDP,
    "fsdp2": _FSDP,
}
"""What suites need in addition to the training."""
_CANNOT_PREPARE_FSDP2 = "a model and optimizer must be passed together"
"""Accelerate refuses the policy of a Trainer that prepares its model alone, whatever TRL does."""


@dataclass(frozen=True)
class Training:
    """What the ranks of one training measured, and the engines that they built; see :mod:`sharding`."""

    ranks: Sequence[Mapping[str, Any]]
    engines: Mapping[str, Any]
    folder: Path
    accumulation: int = 1

    @property
    def first(self) -> Mapping[str, Any]:
        return self.ranks[0]

    @property
    def failure(self) -> str | None:
        return next(iter(self._failures()), None)

    @property
    def failures_of_other_ranks(self) -> dict[str, list[str]]:
        """What other ranks failed with besides :attr:`failure`, as evidence; empty if nothing else was raised."""
        others = self._failures()[1:]
        return {"failures_of_other_ranks": others} if others else {}

    def _failures(self) -> list[str]:
        return distinct(rank["failure"] for rank in self.ranks)

    @property
    def losses(self) -> list[float]:
        """Of every step, over all ranks and accumulated batches."""
        # Not of one rank: TRL deals rows to batches by each rank's own dice.
        batches = [sum(batch) / len(batch) for batch in zip(*(rank["losses"] for rank in self.ranks), strict=True)]
        size = self.accumulation
        return [sum(batches[start : start + size]) / size for start in range(0, len(batches), size)]

    @property
    def first_tokens(self) -> list[list[int]]:
        """New tokens of the first generation, over all ranks; empty where none was finished."""
        return [row for rank in self.ranks for row in (rank["generated"] or [[]])[0]]


@dataclass(frozen=True)
class Trainings:
    """Trains once for each subject and strategy.

    Attributes:
        launches: makes each launch once.
        folder: below which each has a folder of its own.
    """

    launches: LaunchCache
    model: TinyModel
    folder: Path

    def __call__(self, subject: str, strategy: str) -> Training:
        """The training under ``strategy``.

        Raises:
            Absent: this release of the stack cannot train under it, whatever TRL does.
            LaunchError: it failed before there was anything to measure.
        """
        self.single(subject, strategy)  # saves the model that the ranks read
        training = self._train(subject, strategy, _ACCUMULATION.get(strategy, 1))
        built_as_asked(strategy.partition("-")[0], training.engines, training.failure)
        return training

    def single(self, subject: str, strategy: str) -> Training:
        """What is expected of a training under ``strategy``: the same in one process."""
        return self._train(subject, "single", _ACCUMULATION.get(strategy, 1))

    def _train(self, subject: str, strategy: str, accumulation: int) -> Training:
        folder = self.folder / f"{subject}-{strategy}-{accumulation}"
        result = self.launches(
            sharding.train,
            subject,
            self.model,
            str(folder),
            measured=_MEASURED.get(strategy, ()),
            gradient_accumulation_steps=accumulation,
            strategy=strategy.partition("-")[0],
            options=_OPTIONS.get(strategy, {}),
            world_size=1 if strategy == "single" else WORLD_SIZE,
            # A broken trainer fails before it has wrapped anything; suites look at the engines.
            sharded=False,
        )
        return Training(result.values, result.ranks[0].proof["engines"], folder, accumulation)


def built_as_asked(strategy: str, engines: Mapping[str, Any], failure: str | None) -> None:
    """
    Args:
        engines: that a rank built, by name; empty where training failed before.
        failure: what training ended in, if it failed.

    Raises:
        Absent: this release of the stack cannot train under ``strategy``, whatever TRL does.
    """
    engine = "deepspeed" if strategy.startswith("zero") else strategy
    if engines and engine not in engines:
        raise Absent(f"{strategy} was asked for, and this stack built {', '.join(engines)}")
    error_text, _ = _location.apart(failure or "")
    if _CANNOT_PREPARE_FSDP2 in error_text:
        raise Absent(f"the Trainer of this release of Transformers cannot train under {strategy}: {error_text}")


def greatest_difference(first: Mapping[str, bytes], second: Mapping[str, bytes]) -> float:
    """Between elements of float32 tensors with the same names; NaN counts as infinite, as do other shapes or names."""
    if {name: len(data) for name, data in first.items()} != {name: len(data) for name, data in second.items()}:
        return math.inf
    differences = (
        abs(left - right)
        for name, data in first.items()
        for left, right in zip(array("f", data), array("f", second[name]), strict=True)
    )
    return max((math.inf if math.isnan(difference) else difference for difference in differences), default=math.inf)


def read_safetensors(folder: Path, name: str = "model.safetensors") -> dict[str, bytes]:
    """The float32 tensors that lie in a folder's file; none where there is no such file.

    Read here, in a process that never had the model: https://huggingface.co/docs/safetensors.
    """
    file = folder / name
    if not file.is_file():
        return {}
    content = file.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    return {
        name: content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] == "F32"
    }
