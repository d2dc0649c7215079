"""The records of a conformance training on sampled completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.step_records import StepRecord

if TYPE_CHECKING:
    import torch

__all__ = ["Generated", "MicroBatchRecord", "Recording"]


@dataclass
class Generated:
    """One call of ``generate`` on one rank.

    Attributes:
        prompts, completions: token ids of each row, without padding.
        arguments: those that decide how tokens are drawn, by name, as the call would have used them.
        rewarded: the arguments of each reward function, by its name: completions, prompts, column.
        evaluation: whether it belongs to an evaluation.
        sampled: with tools, for each completion, which of its tokens the model sampled. The calls of ``generate`` for
            further turns are then part of this record.
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
        generation: index of the newest generation.
        rows: for each row, prompt ids without padding and completion ids with it; empty where this release passes no
            tokens to ``compute_loss``.
        values: by quantity, for each row a number or numbers of its tokens, as far as the release shows them.
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
        evaluations: for each evaluation, after how many steps it was, and what it logged.
        tables: completions that were printed: prompts, completions, and rewards by function.
        seeded: names of weights that differ between two trainers with one seed.
        changed: dictionaries of the user's config that building the trainer changed: before and after.
        checkpointed: for each micro-batch of a model that checkpoints activations, the keywords with which it does so.
        prompts_before_resuming: for each generation of a training that was resumed later.
        returned: what each evaluation returned.
        tool_calls: the numbers of the words with which the tool was called.
        asked: token ids and ``target`` of each prompt of the datasets of ``training`` and ``evaluation``.
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

    @property
    def trained_on(self) -> int:
        """How many micro-batches were trained on until now."""
        return sum(not batch.evaluation for batch in self.micro_batches)
