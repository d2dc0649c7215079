"""What is kept of a conformance training. Imports nothing of the stack."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.training import StepRecord

if TYPE_CHECKING:
    import torch

__all__ = ["Generated", "MicroBatchRecord", "Recording"]


@dataclass
class Generated:
    """One call of ``generate`` on one rank.

    Attributes:
        prompts, completions: token ids of each row, without padding.
        arguments: what decides how tokens are drawn, by name, as the call would have used it.
        rewarded: what each reward function was called with, by its name: completions, prompts, column.
        evaluation: whether it belongs to an evaluation.
        sampled: with tools, of each completion which of its tokens the model sampled; then the calls of ``generate``
            for further turns are part of this one.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    arguments: dict[str, Any]
    rewarded: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    evaluation: bool = False
    sampled: list[list[bool]] | None = None


@dataclass
class MicroBatchRecord:
    """One call of ``compute_loss`` on one rank.

    Attributes:
        generation: index of the newest one.
        rows: prompt ids without padding and completion ids with it, of each row; empty where this release gives
            ``compute_loss`` no tokens.
        values: by quantity, per row numbers or tokens' numbers, as far as the release shows them.
        pixel_values: ``(images or patches, numbers)`` of prompts with images.
    """

    generation: int
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]]
    values: dict[str, list[Any]] = field(default_factory=dict)
    evaluation: bool = False
    pixel_values: torch.Tensor | None = None


@dataclass
class Recording:
    """A training on one rank.

    Attributes:
        arguments: fields of the config as the trainer has them.
        evaluations: of each evaluation, what was logged and after how many steps.
        tables: of completions that were printed: prompts, completions, and rewards by function.
        seeded: of two trainers with one seed, names of weights that differ.
        changed: dictionaries of the user's config that building the trainer changed: before and after.
        checkpointed: with which keywords activations are checkpointed, at each micro-batch of a model that does so.
        prompts_before_resuming: of each generation of a training that was resumed later.
        returned: by each evaluation.
        tool_calls: with the numbers of which words the tool was called.
        asked: of the datasets of ``training`` and of ``evaluation``, token ids and ``target`` of each prompt.
    """

    arguments: dict[str, Any]
    generated: list[Generated] = field(default_factory=list)
    micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    asked: dict[str, list[tuple[tuple[int, ...], int]]] = field(default_factory=dict)
    returned: list[dict[str, float]] = field(default_factory=list)
    tables: list[tuple[list[Any], list[Any], dict[str, list[float]]]] = field(default_factory=list)
    seeded: list[str] = field(default_factory=list)
    tool_calls: list[int] = field(default_factory=list)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    checkpointed: list[dict[str, Any]] = field(default_factory=list)
    prompts_before_resuming: list[list[list[int]]] = field(default_factory=list)
    in_evaluation: bool = False

    def trained_on(self) -> int:
        """How many micro-batches there were of training until now."""
        return sum(not batch.evaluation for batch in self.micro_batches)
