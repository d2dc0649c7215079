"""On-policy distillation: a student is to predict its own completions as a teacher does, and what is logged of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference._together import output_of_rows
from pytest_trlcompat.reference.metrics import completion_metrics
from pytest_trlcompat.reference.settings import check_choices
from pytest_trlcompat.reference.supervised import Batch, Measured, SupervisedSettings, SupervisedUndecided

__all__ = ["DistillationObjective", "DistillationSettings", "DistillationUndecided", "generalized_divergences"]

_UNDECIDED: dict[str, tuple[object, ...]] = {"loss_mean": ("completions", "tokens")}


@dataclass(frozen=True, kw_only=True)
class DistillationUndecided(SupervisedUndecided):
    """What documentation leaves open for distillation; each default is the simplest reading.

    Attributes:
        loss_mean: the loss of a step is a mean over its ``"completions"`` of the means over their tokens, as in the
            paper (``D(p_T || p_S)(y|x)`` has the factor ``1 / L_y``), or over all its ``"tokens"``: the documentation
            of the arguments names neither.
        entropy_at_temperature: whether entropies are those of the distribution that completions are sampled from, or
            of that at temperature 1.
        no_terminated_length: the terminated lengths where no completion terminates.
    """

    loss_mean: str = "completions"
    entropy_at_temperature: bool = True
    no_terminated_length: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(SupervisedSettings):
    """The arguments of ``DistillationConfig`` that decide what a step gives, from TRL 1.10 on.

    Names and defaults are those of TRL 1.16.0: https://huggingface.co/docs/trl/distillation_trainer.

    Attributes:
        beta: which divergence, see :func:`generalized_divergences`.
        temperature: "for sampling during generation and for computing the distillation loss": of student and teacher.
        eos_token_id: of several ends of sequence each ends a completion.
        undecided: what the documentation leaves open.

    Raises:
        ValueError: for a ``beta`` that is not between 0 and 1, and a temperature that is not positive.
    """

    beta: float = 1.0
    temperature: float = 1.0
    eos_token_id: int | tuple[int, ...] = 1
    learning_rate: float = 1e-6
    undecided: DistillationUndecided = field(default_factory=DistillationUndecided)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta={self.beta} is not between 0 and 1")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} is not positive")


def generalized_divergences(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence of each pair of distributions, ``(...)``, in nats.

    With ``M = beta P_T + (1 - beta) P_S`` it is ``beta KL(P_T || M) + (1 - beta) KL(P_S || M)``; at the ends of the
    range, where that is 0, the forward KL divergence ``KL(P_T || P_S)`` for 0, and the reverse one ``KL(P_S || P_T)``
    for 1.

    Source: Agarwal et al., On-Policy Distillation of Language Models, equation 1 and section 3,
    https://arxiv.org/abs/2306.13649; ``beta`` in the documentation of ``DistillationConfig``.

    Args:
        student, teacher: ``(..., V)``, log-probabilities.
    """
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    # log M from logarithms alone, so that no small probability becomes 0.
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
    return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


@dataclass(frozen=True)
class _Scored:
    """A completion of ``T`` sampled tokens.

    Attributes:
        divergences, entropies: ``(T,)``, in nats.
        ended: whether the last token is an end of sequence.
        tokens: of prompt and completion, without results of tools.
    """

    divergences: Tensor
    entropies: Tensor
    ended: bool
    tokens: int


class DistillationObjective:
    """An objective of :func:`~pytest_trlcompat.reference.supervised_train` for completions that the student sampled.

    A row has the columns ``ids`` and ``mask``: token ids of the prompt and of the completion up to its end, and 1 for
    each token that the student sampled. Of each of these the loss is the divergence of the teacher's distribution over
    the whole vocabulary from the student's, both at ``temperature``; the loss of a step is the mean of its completions
    or tokens on all ranks, and that of a batch of an evaluation the mean of its own.

    What is logged:

    - ``entropy``: "average entropy of token predictions across generated completions".
    - ``num_tokens``: "the total number of tokens processed so far, including both prompts and completions".
    - ``completions/...``: see :func:`~pytest_trlcompat.reference.completion_metrics`.

    Documentation of these names: https://huggingface.co/docs/trl/grpo_trainer#logged-metrics.
    """

    def __init__(self, teacher: Any, settings: DistillationSettings) -> None:
        """
        Args:
            teacher: called as the student is; it has the same vocabulary.
        """
        self.teacher, self.settings = teacher, settings

    def __call__(self, model: Any, batches: Sequence[Sequence[Batch]]) -> list[Measured]:
        scored = [[self._scored(model, row) for row in batch] for ranks in batches for batch in ranks]
        every = [completion for batch in scored for completion in batch]
        together = self._lengths(every)
        return [self._measured(batch, every, together) for batch in scored]

    def _scored(self, model: Any, row: Mapping[str, Sequence[float]]) -> _Scored:
        temperature = self.settings.temperature
        ids, mask = [int(value) for value in row["ids"]], [bool(value) for value in row["mask"]]
        # The distribution of a token is what the model gives at the token before it.
        places = torch.tensor([place - 1 for place, counts in enumerate(mask) if counts])
        logits = _logits(model, ids)[places]
        with torch.no_grad():
            teacher = torch.log_softmax(_logits(self.teacher, ids)[places] / temperature, -1)
        student = torch.log_softmax(logits / temperature, -1)
        drawn = student if self.settings.undecided.entropy_at_temperature else torch.log_softmax(logits, -1)
        ends = self.settings.eos_token_id
        return _Scored(
            generalized_divergences(student, teacher, self.settings.beta),
            -(drawn.exp() * drawn).sum(-1).detach(),
            ids[-1] in ((ends,) if isinstance(ends, int) else ends),
            # The prompt ends at the first sampled token; results of tools between sampled tokens are not counted.
            mask.index(True) + sum(mask),
        )

    def _measured(self, batch: Sequence[_Scored], every: Sequence[_Scored], together: Mapping[str, float]) -> Measured:
        return Measured(
            self._mean(batch, every),
            self._mean(batch, batch),
            metrics={"entropy": _total([completion.entropies for completion in batch])},
            counted={"num_tokens": float(sum(completion.tokens for completion in batch))},
            together=together,
        )

    def _mean(self, batch: Sequence[_Scored], every: Sequence[_Scored]) -> Tensor:
        """What a batch adds to the mean of every one of them."""
        if self.settings.undecided.loss_mean == "tokens":
            return torch.cat([completion.divergences for completion in batch]).sum() / sum(
                len(completion.divergences) for completion in every
            )
        return torch.stack([completion.divergences.mean() for completion in batch]).sum() / len(every)

    def _lengths(self, every: Sequence[_Scored]) -> dict[str, float]:
        lengths = torch.tensor([len(completion.divergences) for completion in every])
        ended = torch.tensor([completion.ended for completion in every])
        return completion_metrics(lengths, ended, self.settings.undecided.no_terminated_length)


def _logits(model: Any, ids: Sequence[int]) -> Tensor:
    """``(tokens, V)``, of one row alone and without padding; of a 16-bit model in 32 bits."""
    (logits,) = output_of_rows(model, [torch.tensor(list(ids))])
    return logits


def _total(parts: Sequence[Tensor]) -> tuple[Tensor, float]:
    whole = torch.cat(list(parts))
    return whole.sum(), float(len(whole))
