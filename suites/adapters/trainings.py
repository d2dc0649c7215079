"""Trainings of adapters that several suites judge, and how: by what every rank failed with, and by one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding

from ..in_rank import adapter_saving
from ..launches import Failures, distinct
from ..verdicts import failure_of, unequal

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["AdapterTraining", "AdapterTrainings", "as_in_one_process", "failures_in", "with_every_failure"]

_STAGES = {"training": "failure", "saving": "saving", "resuming": "resuming"}
"""What a rank calls the failures of each."""
_RESUMED = ("ddp", "fsdp1")
"""The strategies under which resuming is judged."""
_OTHERS = "failures_of_other_ranks"
_KEYS = ("trainable", "without_gradient", "frozen_moved", "grad_norm", "weights")
"""What is compared with one process."""


@dataclass(frozen=True)
class AdapterTraining:
    """What the ranks measured (:mod:`adapter_saving`), the engines that rank 0 built, and where it saved."""

    ranks: Sequence[Mapping[str, Any]]
    engines: Mapping[str, Any]
    folder: Path

    @property
    def first(self) -> Mapping[str, Any]:
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


def with_every_failure(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What rank 0 measured of one variant, with the ``failure`` of any rank, and what else other ranks failed with.

    Args:
        ranks: what :func:`adapters.lora_trainings` measured of the variant on each.
    """
    texts = distinct(rank["failure"] for rank in ranks)
    others = {_OTHERS: texts[1:]} if texts[1:] else {}
    return {**ranks[0], "failure": texts[0] if texts else None, **others}


def failures_in(runs: Mapping[str, Mapping[str, Any]]) -> Failures:
    """Those of the variants of a group, by their names."""
    return Failures(
        {name: run["failure"] for name, run in runs.items() if run["failure"]},
        {name: run[_OTHERS] for name, run in runs.items() if _OTHERS in run},
    )


def as_in_one_process(issue: str, run: Mapping[str, Any], expected: Mapping[str, Any], steps: int) -> Finding:
    """``ok`` where all that shall learn had a finite gradient at each step, and nothing else moved, and where gradient
    norms and the weights afterwards are those of one process, relative to their size.

    Args:
        run, expected: what :func:`adapters.lora_trainings` measured of one variant.
        steps: how many ``expected`` must have.
    """
    failed = failure_of(issue, {"train": run["failure"]} if run["failure"] else {})
    if failed:
        return Finding(failed, dict(run))
    assert len(expected["grad_norm"]) == steps, expected
    assert expected["grad_norm"][-1] > 0, expected
    evidence = {key: run[key] for key in _KEYS} | {f"{key}_in_one_process": expected[key] for key in _KEYS}
    wrong = (
        run["trainable"] != expected["trainable"]
        or run["without_gradient"]
        or run["frozen_moved"]
        or unequal(run["grad_norm"], expected["grad_norm"], relative=True)
        or unequal([run["weights"]], [expected["weights"]], relative=True)
    )
    return Finding(Verdict.SILENT if wrong else Verdict.OK, evidence)
