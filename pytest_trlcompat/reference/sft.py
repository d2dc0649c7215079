"""Supervised fine-tuning: the loss of rows whose labels are given, and what documentation says a row becomes.

Source: https://huggingface.co/docs/trl/sft_trainer, and the documentation of ``SFTConfig``'s arguments; for
``loss_type="dft"`` Wu et al., "On the Generalization of SFT", https://arxiv.org/abs/2508.05629.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference.experts import load_balancing_loss
from pytest_trlcompat.reference.inputs import tensors_of
from pytest_trlcompat.reference.settings import check_choices
from pytest_trlcompat.reference.supervised import (
    Batch,
    Measured,
    Objective,
    SupervisedSettings,
    SupervisedUndecided,
)

__all__ = [
    "IGNORED",
    "SFTSettings",
    "SFTUndecided",
    "best_fit_bins",
    "labels_of",
    "sft_objective",
    "split_rows",
    "truncated",
    "wrapped_blocks",
]

IGNORED = -100
"""The label of a token that does not count."""
_CHOICES: dict[str, tuple[object, ...]] = {"loss_type": ("nll", "dft", "chunked_nll")}
_UNDECIDED: dict[str, tuple[object, ...]] = {
    "appended_eos": ("always", "unless_there", "never"),
    "entropy_over": ("labels", "tokens"),
    "loss_mean": ("step", "micro_batches"),
    "prompt_completion_as": ("text", "conversation"),
    "rows_without_labels": ("kept", "dropped"),
    "wrapped_remainder": ("kept", "dropped"),
}


@dataclass(frozen=True, kw_only=True)
class SFTUndecided(SupervisedUndecided):
    """What documentation leaves open; each default is the simplest reading.

    Attributes:
        appended_eos: whether the end-of-sequence token is put behind a text that no chat template has written, or
            behind a completion: ``"always"``, ``"unless_there"`` where it ends with one, or ``"never"``.
        entropy_over: the "non-masked tokens" whose entropy is logged: those that are predicted as a ``"label"``, or
            all but padding.
        loss_mean: "the average cross-entropy loss computed over non-masked tokens": over those of a whole
            ``"step"``, all its micro-batches, or the mean over ``"micro_batches"`` of their averages.
        first_token_counts: whether the first token of a row, where its label is not masked, counts among the non-masked
            tokens of a step that the sum is divided by, though nothing predicts it. With label smoothing it does not.
        first_token_counts_in_evaluation: the same of a batch of an evaluation.
        prompt_completion_as: a prompt and a completion that are texts are one ``"text"`` together, or the messages of a
            ``"conversation"``.
        rows_without_labels: rows of which truncation has left no token that counts.
        wrapped_remainder: the last block of ``packing_strategy="wrapped"``, where it is shorter than the others.
    """

    appended_eos: str = "unless_there"
    entropy_over: str = "labels"
    loss_mean: str = "step"
    first_token_counts: bool = False
    first_token_counts_in_evaluation: bool = False
    prompt_completion_as: str = "text"
    rows_without_labels: str = "kept"
    wrapped_remainder: str = "kept"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class SFTSettings(SupervisedSettings):
    """The arguments of ``SFTConfig`` and ``TrainingArguments`` that decide what a step does with its rows.

    Attributes:
        loss_type: ``"chunked_nll"`` is ``"nll"``, computed in parts.
        label_smoothing_factor: "labels are changed from 0s and 1s to
            ``label_smoothing_factor/num_labels`` and
            ``1 - label_smoothing_factor + label_smoothing_factor/num_labels``".
        average_tokens_across_devices: whether means over tokens are over those of all ranks; otherwise each rank takes
            its own, and gradients are the mean of the ranks'.
        router_aux_loss_coef: weight of the auxiliary loss of a mixture of experts; ``None``: the model is none, or
            gives no such loss. Give the model's own where the argument is not set.
        experts_per_token: of a mixture of experts.
    """

    loss_type: str = "nll"
    label_smoothing_factor: float = 0.0
    average_tokens_across_devices: bool = True
    router_aux_loss_coef: float | None = None
    experts_per_token: int = 1
    undecided: SFTUndecided = field(default_factory=SFTUndecided)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _CHOICES)


@dataclass(frozen=True)
class _Scored:
    """The tokens of a batch that are predicted and count, one after the other, with the means of the log-probabilities
    of all words there; and the entropies of all but padding."""

    logprobs: Tensor
    means: Tensor
    is_first_choice: Tensor
    entropies: Tensor
    entropies_of_all: Tensor
    tokens: int
    firsts: int
    router_logits: tuple[Tensor, ...]


def sft_objective(settings: SFTSettings) -> Objective:
    """The loss of batches of rows, each a mapping with ``input_ids`` and ``labels`` of equal lengths, perhaps with
    ``inputs``: further inputs of the model by name, such as images, as nested lists.

    A token counts if its label is not :data:`IGNORED`. Nothing predicts the first token of a row, except virtual tokens
    that the model's adapter puts in front, if it gives logits of them. Each row goes through the model alone and
    without padding: rows that a trainer packs together do not see each other.

    - ``loss``: the mean of ``-log p`` over tokens that count, for ``loss_type="dft"`` of ``-sg(p) log p``; with the
      auxiliary loss of a mixture of experts, the mean over micro-batches and ranks.
    - ``entropy``, ``mean_token_accuracy``: means over tokens, see :class:`SFTUndecided`.
    - ``num_tokens``: of all ranks, without padding.
    """
    return functools.partial(_measured, settings)


def _measured(settings: SFTSettings, model: Any, batches: Sequence[Sequence[Batch]]) -> list[Measured]:
    scored = [[_scored(model, batch, settings) for batch in ranks] for ranks in batches]
    ranks_totals = [sum(_counted(ranks[rank], settings) for ranks in scored) for rank in range(len(scored[0]))]
    coefficient = settings.router_aux_loss_coef
    measured = []
    for ranks in scored:
        for rank, scored_batch in enumerate(ranks):
            is_counted = settings.undecided.first_token_counts_in_evaluation and not settings.label_smoothing_factor
            in_evaluation = scored_batch.firsts if is_counted else 0
            token_count = max(1, len(scored_batch.logprobs))
            if settings.undecided.loss_mean == "micro_batches":
                share = 1.0 / (token_count * len(batches) * len(ranks))
            elif settings.average_tokens_across_devices:
                share = 1.0 / max(1, sum(ranks_totals))
            else:
                share = 1.0 / (max(1, ranks_totals[rank]) * len(ranks))
            weights = scored_batch.logprobs.detach().exp() if settings.loss_type == "dft" else 1.0
            smoothing = settings.label_smoothing_factor
            total = -(weights * ((1 - smoothing) * scored_batch.logprobs + smoothing * scored_batch.means)).sum()
            loss, alone = total * share, total / max(1, len(scored_batch.logprobs) + in_evaluation)
            entropies = (
                scored_batch.entropies if settings.undecided.entropy_over == "labels" else scored_batch.entropies_of_all
            )
            metrics: dict[str, tuple[Tensor | float, float]] = {
                "entropy": (entropies.detach().sum(), float(len(entropies))),
                "mean_token_accuracy": (
                    scored_batch.is_first_choice.double().sum(),
                    float(len(scored_batch.is_first_choice)),
                ),
            }
            if coefficient is not None:
                auxiliary = load_balancing_loss(torch.cat(scored_batch.router_logits), settings.experts_per_token)
                loss = loss + coefficient * auxiliary / (len(batches) * len(ranks))
                alone = alone + coefficient * auxiliary
                metrics["aux_loss"] = (auxiliary.detach(), 1.0)
            measured.append(Measured(loss, alone, metrics=metrics, counted={"num_tokens": float(scored_batch.tokens)}))
    return measured


def _counted(scored: _Scored, settings: SFTSettings) -> int:
    are_firsts = settings.undecided.first_token_counts and not settings.label_smoothing_factor
    return len(scored.logprobs) + (scored.firsts if are_firsts else 0)


def _scored(model: Any, rows: Batch, settings: SFTSettings) -> _Scored:
    device = next(model.parameters()).device
    logprobs, means, choices, entropies, every, routed = [], [], [], [], [], []
    tokens = firsts = 0
    for row in rows:
        ids = torch.tensor([list(row["input_ids"])], device=device)
        labels = torch.tensor(list(row["labels"]), device=device)
        more: dict[str, Any] = {} if settings.router_aux_loss_coef is None else {"output_router_logits": True}
        more |= {name: tensor.to(device) for name, tensor in tensors_of(row.get("inputs")).items()}
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
        routed += (
            [layer_logits.cpu() for layer_logits in output.router_logits] if "output_router_logits" in more else []
        )
        whole = torch.log_softmax(getattr(output, "logits", output)[0].float(), -1)
        # Virtual tokens of an adapter stand in front of a row: they have logits and no labels.
        virtual = len(whole) - len(labels)
        labels = torch.nn.functional.pad(labels, (virtual, 0), value=IGNORED)
        entropy = -(whole.exp() * whole).sum(-1)
        counts = labels[1:] != IGNORED
        # (tokens that count, V); logits at a token are of the next one.
        predicted = whole[:-1][counts]
        targets = labels[1:][counts].long()
        logprobs.append(predicted.gather(-1, targets[:, None])[:, 0])
        means.append(predicted.mean(-1))
        choices.append(predicted.argmax(-1) == targets)
        entropies.append(entropy[:-1][counts])
        every.append(entropy[virtual:])
        tokens += len(row["labels"])
        firsts += int(labels[0] != IGNORED)
    joined = [torch.cat(parts).cpu() for parts in (logprobs, means, choices, entropies, every)]
    return _Scored(joined[0], joined[1], joined[2], joined[3], joined[4], tokens, firsts, tuple(routed))


def labels_of(ids: Sequence[int], counts: Iterable[object]) -> tuple[int, ...]:
    """The label of each token: itself where it counts, else :data:`IGNORED`; and of the first one, which nothing
    predicts."""
    labels = [token if counted else IGNORED for token, counted in zip(ids, counts, strict=True)]
    return (IGNORED, *labels[1:])


def truncated(values: Sequence[int], max_length: int | None, truncation_mode: str = "keep_start") -> tuple[int, ...]:
    """At most ``max_length`` of a row's values, the first ones or, ``"keep_end"``, the last ones."""
    if max_length is None or len(values) <= max_length:
        return tuple(values)
    return tuple(values[:max_length] if truncation_mode == "keep_start" else values[-max_length:])


def best_fit_bins(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Best-fit decreasing: the longest first, each into the bin with the least room that it fits into; indices by bin.

    Source: ``packing_strategy="bfd"``; https://arxiv.org/abs/2404.10830. Undecided by the documentation: which of equal
    lengths comes first, on which the number of bins does not depend.

    Raises:
        ValueError: for a length above ``size``.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if lengths[index] > size:
            raise ValueError(f"a row of {lengths[index]} tokens fits into no bin of {size}")
        fitting = [place for place, left in enumerate(room) if left >= lengths[index]]
        if fitting:
            place = min(fitting, key=room.__getitem__)
        else:
            place = len(bins)
            bins.append([])
            room.append(size)
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def split_rows(values: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """A row in pieces of at most ``size``, as ``packing_strategy="bfd_split"`` splits what is too long."""
    return [tuple(values[start : start + size]) for start in range(0, len(values), size)]


def wrapped_blocks(
    rows: Sequence[Mapping[str, Sequence[int]]], size: int, remainder: str = "kept"
) -> list[dict[str, tuple[int, ...]]]:
    """All rows one after the other, cut into blocks of ``size``: ``packing_strategy="wrapped"``."""
    streams = {name: [value for row in rows for value in row[name]] for name in rows[0]}
    count = len(next(iter(streams.values())))
    starts = range(0, count if remainder == "kept" else count - count % size, size)
    return [{name: tuple(stream[start : start + size]) for name, stream in streams.items()} for start in starts]
