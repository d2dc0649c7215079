"""One training of an adapter per subject and strategy, shared by the suites that judge it.

Runs in the test process and imports nothing of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..in_rank import adapter_saving
from ..launches import Failures

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["AdapterTraining", "AdapterTrainings"]


_STAGES = {"training": "failure", "saving": "saving", "resuming": "resuming"}
"""What a rank calls the failures of each."""
_RESUMED = ("ddp", "fsdp1")
"""The strategies under which resuming is judged."""


@dataclass(frozen=True)
class AdapterTraining:
    """What the ranks measured (:mod:`adapter_saving`), the engines that rank 0 built, and where it saved."""

    ranks: Sequence[Mapping[str, Any]]
    engines: Mapping[str, Any]
    folder: Path

    @property
    def found(self) -> Mapping[str, Any]:
        """What rank 0 measured, which alone has the tensors."""
        return self.ranks[0]

    def failures(self, *stages: str) -> Failures:
        """
        Args:
            stages: some of ``training``, ``saving`` and ``resuming``; all where none is named.
        """
        keys = {stage: _STAGES[stage] for stage in stages} or _STAGES
        return Failures.of([{stage: rank.get(key) for stage, key in keys.items()} for rank in self.ranks])


@dataclass(frozen=True)
class AdapterTrainings:
    """Trains for a subject and strategy.

    Attributes:
        launch: makes each launch once.
        folder: below which each has a folder of its own.
    """

    launch: Callable[..., LaunchResult]
    model: TinyModel
    folder: Path

    def __call__(self, subject: str, strategy: str) -> AdapterTraining:
        folder = self.folder / f"{subject}-{strategy}"
        body = adapter_saving.train
        resuming = strategy in _RESUMED
        # Not sharded where a broken trainer fails before it has wrapped anything.
        result = self.launch(body, subject, self.model, str(folder), resuming, strategy=strategy, sharded=False)
        return AdapterTraining(result.values, result.ranks[0].proof["engines"], folder)
