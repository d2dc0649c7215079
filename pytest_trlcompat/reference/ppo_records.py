"""What a step of PPO is given, and everything that it makes, in the order in which it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pytest_trlcompat.reference.on_policy_settings import OnPolicySettings
from pytest_trlcompat.reference.records import Layout
from pytest_trlcompat.reference.tokens import Tokens

__all__ = [
    "Episodes",
    "Experience",
    "PPOLayout",
    "PPOMicroBatch",
    "PPOOptimizerStep",
    "PPOStep",
    "check_ppo_layout",
    "unshuffled_layout",
]

PPOLayout = Sequence[Sequence[Layout]]
"""Rows of a batch by epoch, mini-batch, micro-batch and rank: ``layout[epoch][mini_batch][micro_batch][rank]``."""


@dataclass(frozen=True)
class Episodes:
    """Responses of all ranks that were sampled together: a batch, whose rows each rank has the next part of.

    Attributes:
        queries: ``R`` rows of token ids without padding.
        responses: ``R`` rows of token ids as they were sampled, without padding.
        scores: ``R`` numbers of the reward model, before penalties; ``None`` where it is asked.

    Raises:
        ValueError: for unequal numbers of rows.
    """

    queries: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    scores: Sequence[float] | None = None

    def __post_init__(self) -> None:
        scores = self.queries if self.scores is None else self.scores
        if not len(self.queries) == len(self.responses) == len(scores):
            raise ValueError(f"{len(self.queries)} queries, {len(self.responses)} responses, {len(scores)} scores")


@dataclass(frozen=True)
class Experience:
    """What is made once for a batch, over all ranks; ``R`` rows, ``C`` tokens in the longest response.

    Attributes:
        tokens: ids and masks of queries and responses; a response ends with its first stop token.
        has_eos: ``(R,)``, whether an end of sequence counts for ``missing_eos_penalty``.
        logprobs: ``(R, C)``, of the policy that sampled, without a gradient.
        reference_logprobs: ``(R, C)``.
        entropies: ``(R, C)``, nats, of the policy that sampled.
        step_mask: ``(R, C)``, steps that have a reward and a value: the tokens that count, and a step after them where
            ``score_at="after_last_token"`` and there is place.
        values: ``(R, C)``, of the state before each token, 0 where ``step_mask`` is false.
        scores: ``(R,)``, of the reward model.
        penalised_scores: ``(R,)``.
        kl: ``(R, C)``, estimate of the divergence from the reference model.
        rewards: ``(R, C)``, penalty for the divergence, and the score at the end of the episode.
        whitened_rewards: ``(R, C)``, the same where ``whiten_rewards`` is not set.
        returns: ``(R, C)``, advantages before whitening, and values.
        advantages: ``(R, C)``, whitened.
    """

    tokens: Tokens
    has_eos: Tensor
    logprobs: Tensor
    reference_logprobs: Tensor
    entropies: Tensor
    step_mask: Tensor
    values: Tensor
    scores: Tensor
    penalised_scores: Tensor
    kl: Tensor
    rewards: Tensor
    whitened_rewards: Tensor
    returns: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class PPOMicroBatch:
    """What one rank makes of one micro-batch; ``R`` rows of a batch, ``C`` as wide as it.

    Attributes:
        rank: which rank.
        rows: of the batch.
        mask: ``(R, C)``, tokens that count in the policy's loss.
        step_mask: ``(R, C)``, steps that count in the value function's loss.
        logprobs: ``(R, C)``, of the policy.
        entropies: ``(R, C)``, nats.
        values: ``(R, C)``.
        ratios: ``(R, C)``, of policy to the policy that sampled.
        policy_losses: ``(R, C)``, negative clipped objective of each token.
        value_losses: ``(R, C)``, clipped squared error of each step, halved by ``value_loss_scale``.
        policy_clipped: ``(R, C)``, boolean.
        value_clipped: ``(R, C)``, boolean.
        policy_loss: a scalar, its part of the optimizer step's.
        value_loss: a scalar, likewise, without ``vf_coef``.
    """

    rank: int
    rows: tuple[int, ...]
    mask: Tensor
    step_mask: Tensor
    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    ratios: Tensor
    policy_losses: Tensor
    value_losses: Tensor
    policy_clipped: Tensor
    value_clipped: Tensor
    policy_loss: Tensor
    value_loss: Tensor


@dataclass(frozen=True)
class PPOOptimizerStep:
    """One optimizer step over all ranks: a mini-batch of an epoch.

    Names of parameters begin with ``policy.`` and ``value_model.``.

    Attributes:
        micro_batches: by time, then by rank.
        policy_loss, value_loss: scalars.
        loss: a scalar, ``policy_loss + vf_coef * value_loss``.
        gradients: of the loss, before clipping.
        grad_norm: a scalar, before clipping.
        clipped_gradients: what the optimizer gets.
        learning_rate: of this step.
        weights: of the trained parameters after the step.
    """

    micro_batches: tuple[PPOMicroBatch, ...]
    policy_loss: Tensor
    value_loss: Tensor
    loss: Tensor
    gradients: Mapping[str, Tensor]
    grad_norm: Tensor
    clipped_gradients: Mapping[str, Tensor]
    learning_rate: float
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class PPOStep:
    """What one batch of episodes gives; fields and their fields are in the order in which a step makes them.

    Attributes:
        experience: made before the first optimizer step.
        optimizer_steps: ``num_mini_batches`` for each of ``num_ppo_epochs`` epochs.
        logs: what is logged for the batch, by the names of
            https://huggingface.co/docs/trl/v1.12.0/ppo_trainer#explanation-of-the-logged-metrics.
    """

    experience: Experience
    optimizer_steps: tuple[PPOOptimizerStep, ...]
    logs: Mapping[str, float]


def unshuffled_layout(rows: int, settings: OnPolicySettings) -> list[list[list[list[list[int]]]]]:
    """Each rank has the next ``rows / world_size`` rows, and goes through them in order, in every epoch.

    "At each epoch, it shuffles the batch indices" (Huang et al., policy training, detail 7): give the layout that a
    trainer has drawn, to be held against it.

    Raises:
        ValueError: if rows cannot be shared equally.
    """
    ranks, minis, micros = settings.world_size, settings.num_mini_batches, settings.gradient_accumulation_steps
    size, rest = divmod(rows, ranks * minis * micros)
    if rest or not size:
        raise ValueError(
            f"{rows} responses cannot be shared by {ranks} ranks in {minis} mini-batches of {micros} micro-batches"
        )

    def part(rank: int, mini: int, micro: int) -> list[int]:
        start = ((rank * minis + mini) * micros + micro) * size
        return list(range(start, start + size))

    epoch = [[[part(rank, mini, micro) for rank in range(ranks)] for micro in range(micros)] for mini in range(minis)]
    return [epoch] * settings.num_ppo_epochs


def check_ppo_layout(layout: PPOLayout, rows: int, settings: OnPolicySettings) -> None:
    """Raise :class:`ValueError` unless each epoch has every row once, on its own rank, in as many parts as are set."""
    counts = len(layout), {len(epoch) for epoch in layout}, {len(mini) for epoch in layout for mini in epoch}
    expected = settings.num_ppo_epochs, {settings.num_mini_batches}, {settings.gradient_accumulation_steps}
    if counts != expected:
        epochs, minis, micros = counts
        raise ValueError(
            f"the layout has {epochs} epochs of {minis} mini-batches of {micros} micro-batches, not {expected}"
        )
    size = rows // settings.world_size
    for number, epoch in enumerate(layout):
        ranks: list[list[int]] = [[] for _ in range(settings.world_size)]
        for mini in epoch:
            for micro in mini:
                for rank_rows, more in zip(ranks, micro, strict=True):
                    rank_rows += more
        for rank, rank_rows in enumerate(ranks):
            if sorted(rank_rows) != list(range(rank * size, (rank + 1) * size)):
                raise ValueError(
                    f"epoch {number}: rank {rank} has rows {sorted(rank_rows)} of {rows} on {len(ranks)} ranks"
                )
