"""What a step is given, and everything that it makes, in the order in which it is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from pytest_trlcompat.reference.rewards import Advantages
from pytest_trlcompat.reference.settings import SamplingSettings
from pytest_trlcompat.reference.tokens import Tokens

__all__ = ["Evaluation", "GRPOStep", "Generation", "Layout", "MicroBatch", "Rollout", "contiguous_layout", "quantities"]

Layout = Sequence[Sequence[Sequence[int]]]
"""Rows of a generation by micro-batch and rank: ``layout[micro_batch][rank]``."""


@dataclass(frozen=True)
class Rollout:
    """Completions of all ranks that were sampled together, and their rewards.

    Attributes:
        prompts: ``R`` rows of token ids without padding; the rows of a group follow each other, with one prompt.
        completions: ``R`` rows of token ids.
        rewards: ``R`` rows of a number from each reward function, or ``None`` where a function gave none.
        reward_names: of the functions, as the logs name them; ``reward_0``, ``reward_1``, ... where they are not given.
        sampled: of each completion, which of its tokens the policy sampled, where others stand between them: the
            results of tools. Then each completion is what it is to its end, whatever ends of sequence it has.
        inputs: of each row, inputs of models other than tokens, by name, as a processor makes them of this prompt
            alone: ``pixel_values`` and the like, whose first dimension is not that of tokens, and
            :data:`~pytest_trlcompat.reference.TOKEN_INPUTS`, ``(1, tokens of the prompt)``. Empty for a row of text.

    Raises:
        ValueError: for unequal numbers of rows, or of rewards in a row.
    """

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[int]]
    rewards: Sequence[Sequence[float | None]]
    reward_names: Sequence[str] = ()
    sampled: Sequence[Sequence[bool]] | None = None
    inputs: Sequence[Mapping[str, Tensor]] = ()

    def __post_init__(self) -> None:
        if not len(self.prompts) == len(self.completions) == len(self.rewards):
            raise ValueError(
                f"{len(self.prompts)} prompts, {len(self.completions)} completions, {len(self.rewards)} rows of rewards"
            )
        counts = {len(row) for row in self.rewards} | ({len(self.reward_names)} if self.reward_names else set())
        if len(counts) != 1:
            raise ValueError(f"rows and names of rewards have different numbers of functions: {sorted(counts)}")

    @property
    def names(self) -> list[str]:
        """Of the reward functions."""
        return list(self.reward_names) or [f"reward_{index}" for index in range(len(self.rewards[0]))]

    def reward_tensor(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``(R, F)``, NaN for ``None``."""
        rows = [[float("nan") if value is None else float(value) for value in row] for row in self.rewards]
        return torch.tensor(rows, dtype=dtype)

    def check_groups(self, num_generations: int) -> None:
        """Raise :class:`ValueError` unless the rows are groups of ``num_generations`` with one prompt each."""
        if len(self.prompts) % num_generations:
            raise ValueError(f"{len(self.prompts)} completions are no whole groups of {num_generations}")
        for row, prompt in enumerate(self.prompts):
            first = row - row % num_generations
            if list(prompt) != list(self.prompts[first]):
                raise ValueError(f"rows {first} and {row} are of one group, but have different prompts")


@dataclass(frozen=True)
class Generation:
    """What is made once for a rollout, over all ranks.

    Attributes:
        tokens: ids and masks.
        advantages: rewards, their totals and statistics, and advantages.
        old_logprobs: ``(R, C)``, of the policy that sampled, without a gradient.
        reference_logprobs: ``(R, C)``; ``None`` where ``beta`` is 0.
    """

    tokens: Tokens
    advantages: Advantages
    old_logprobs: Tensor
    reference_logprobs: Tensor | None


@dataclass(frozen=True)
class MicroBatch:
    """What one rank makes of one micro-batch; ``R`` rows of a generation, ``C`` as wide as it.

    Attributes:
        generation: index among the step's generations.
        rank: which rank.
        rows: of the generation.
        mask: ``(R, C)``, tokens that count in the loss.
        logprobs: ``(R, C)``, of the policy.
        entropies: ``(R, C)``, nats.
        weights: ``(R, C)``, ratio of policy to old policy.
        high_entropy_mask: ``(R, C)``, ``mask`` less what ``top_entropy_quantile`` leaves out.
        policy_mask: ``(R, C)``, tokens of the policy term: that less what ``off_policy_mask_threshold`` leaves out.
        policy_losses: ``(R, C)``, negative objective of each token.
        kl: ``(R, C)``, estimate of the divergence without weights; ``None`` where ``beta`` is 0.
        shares: ``(R, C)``, what each token's loss is multiplied by.
        loss: a scalar, its part of the step's loss, without the entropy bonus and the auxiliary loss.
        aux_loss: a scalar, the auxiliary loss of a mixture of experts over its rows, prompts included; ``None`` where
            ``router_aux_loss_coef`` is 0.
    """

    generation: int
    rank: int
    rows: tuple[int, ...]
    mask: Tensor
    logprobs: Tensor
    entropies: Tensor
    weights: Tensor
    high_entropy_mask: Tensor
    policy_mask: Tensor
    policy_losses: Tensor
    kl: Tensor | None
    shares: Tensor
    loss: Tensor
    aux_loss: Tensor | None = None


@dataclass(frozen=True)
class GRPOStep:
    """One optimizer step over all ranks; fields and their fields are in the order in which a step makes them.

    Attributes:
        generations: those that its micro-batches are of.
        micro_batches: by time, then by rank.
        policy_loss: a scalar, the sum of the micro-batches' losses.
        entropy_coef: coefficient of the entropy bonus in this step.
        loss: a scalar, with the entropy bonus, and the mean of the micro-batches' auxiliary losses.
        gradients: of the loss, by the parameter's name, before clipping.
        grad_norm: a scalar, before clipping.
        clipped_gradients: by name.
        learning_rate: of this step.
        weights: of the trained parameters after the step, by name.
        logs: what is logged for this step, by the names of https://huggingface.co/docs/trl/grpo_trainer#logged-metrics.
    """

    generations: tuple[Generation, ...]
    micro_batches: tuple[MicroBatch, ...]
    policy_loss: Tensor
    entropy_coef: float
    loss: Tensor
    gradients: Mapping[str, Tensor]
    grad_norm: Tensor
    clipped_gradients: Mapping[str, Tensor]
    learning_rate: float
    weights: Mapping[str, Tensor]
    logs: Mapping[str, float]


@dataclass(frozen=True)
class Evaluation:
    """An evaluation over all ranks.

    Attributes:
        generations: one for each batch.
        micro_batches: by batch, then by rank.
        losses: ``(B,)``, of each batch.
        logs: what is logged, names begin with ``eval_``.
    """

    generations: tuple[Generation, ...]
    micro_batches: tuple[MicroBatch, ...]
    losses: Tensor
    logs: Mapping[str, float]


def contiguous_layout(rows: int, *, world_size: int, micro_batches: int) -> list[list[list[int]]]:
    """Each rank has the next ``rows / world_size`` rows, and goes through them in order.

    Undecided by the documentation: which completions a rank trains on, and in which order. For the gradient of a step
    over a whole generation it matters with ``bnpo`` and ``top_entropy_quantile`` alone. Where a trainer does it
    otherwise, give its layout.

    Raises:
        ValueError: if rows cannot be shared equally.
    """
    size, rest = divmod(rows, world_size * micro_batches)
    if rest or not size:
        raise ValueError(f"{rows} completions cannot be shared by {world_size} ranks in {micro_batches} micro-batches")
    starts = [[(rank * micro_batches + micro) * size for rank in range(world_size)] for micro in range(micro_batches)]
    return [[list(range(start, start + size)) for start in ranks] for ranks in starts]


def check_layout(layout: Layout, rows: int, settings: SamplingSettings) -> None:
    """Raise :class:`ValueError` unless every row is in exactly one micro-batch of one of ``world_size`` ranks."""
    for micro, ranks in enumerate(layout):
        if len(ranks) != settings.world_size:
            raise ValueError(f"micro-batch {micro} has rows for {len(ranks)} ranks, world_size={settings.world_size}")
    placed = sorted(row for ranks in layout for rank_rows in ranks for row in rank_rows)
    if placed != list(range(rows)):
        raise ValueError(f"the layout has rows {placed}, the rollout has rows 0 to {rows - 1}")


def quantities(record: object, name: str = "") -> Iterator[tuple[str, Tensor | float]]:
    """Every number that a record holds, by its path, in the order in which a step makes them.

    The first that differs between two records is where two steps part. ``None`` is left out, row numbers too.

    Args:
        record: a :class:`GRPOStep`, an :class:`Evaluation`, a :class:`Generation`, or any part of one.
        name: to begin paths with.
    """
    if isinstance(record, (Tensor, float)):
        yield name, record
    elif is_dataclass(record):
        for field in fields(record):
            if field.name not in ("generation", "rank", "rows"):
                yield from quantities(getattr(record, field.name), f"{name}.{field.name}" if name else field.name)
    elif isinstance(record, Mapping):
        for key, value in record.items():
            yield from quantities(value, f"{name}[{key}]")
    elif isinstance(record, tuple):
        for index, value in enumerate(record):
            yield from quantities(value, f"{name}[{index}]")
