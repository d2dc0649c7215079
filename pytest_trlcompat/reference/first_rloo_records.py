"""What a step of the first RLOO makes of a batch of episodes, in the order in which it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pytest_trlcompat.reference.first_rloo_rewards import CompletionAdvantages
from pytest_trlcompat.reference.tokens import Tokens

__all__ = ["FirstRLOOExperience", "FirstRLOOMicroBatch", "FirstRLOOOptimizerStep", "FirstRLOOStep"]


@dataclass(frozen=True)
class FirstRLOOExperience:
    """What is made once for a batch, over all ranks; ``R`` rows, ``C`` tokens in the longest response.

    Attributes:
        tokens: ids and masks of queries and responses; a response ends with its first stop token.
        has_eos: ``(R,)``, whether an end of sequence counts for ``missing_eos_penalty``.
        logprobs: ``(R, C)``, of the policy that sampled, without a gradient.
        reference_logprobs: ``(R, C)``.
        entropies: ``(R, C)``, nats, of the policy that sampled.
        scores: ``(R,)``, of the reward model.
        penalised_scores: ``(R,)``.
        kl: ``(R, C)``, estimate of each token's divergence from the reference model, nats; 0 where none counts.
        credit: rewards, baselines and advantages.
    """

    tokens: Tokens
    has_eos: Tensor
    logprobs: Tensor
    reference_logprobs: Tensor
    entropies: Tensor
    scores: Tensor
    penalised_scores: Tensor
    kl: Tensor
    credit: CompletionAdvantages


@dataclass(frozen=True)
class FirstRLOOMicroBatch:
    """What one rank makes of one micro-batch; ``R`` rows of a batch, ``C`` as wide as it.

    Attributes:
        rank: which rank.
        rows: of the batch.
        mask: ``(R, C)``, tokens that count.
        logprobs: ``(R, C)``, of the policy.
        entropies: ``(R, C)``, nats.
        log_ratios: ``(R, C)``, of policy to the policy that sampled; 0 where no token counts.
        ratios: ``(R,)``, of the probabilities of whole completions.
        losses: ``(R,)``, negative clipped objective of each completion.
        clipped: ``(R,)``, boolean.
        loss: a scalar, its part of the optimizer step's.
    """

    rank: int
    rows: tuple[int, ...]
    mask: Tensor
    logprobs: Tensor
    entropies: Tensor
    log_ratios: Tensor
    ratios: Tensor
    losses: Tensor
    clipped: Tensor
    loss: Tensor


@dataclass(frozen=True)
class FirstRLOOOptimizerStep:
    """One optimizer step over all ranks: a mini-batch of an epoch.

    Attributes:
        micro_batches: by time, then by rank.
        loss: a scalar, the mean over the mini-batch's completions.
        gradients: of the loss, by the parameter's name, before clipping.
        grad_norm: a scalar, before clipping.
        clipped_gradients: what the optimizer gets.
        learning_rate: of this step.
        weights: of the trained parameters after the step.
    """

    micro_batches: tuple[FirstRLOOMicroBatch, ...]
    loss: Tensor
    gradients: Mapping[str, Tensor]
    grad_norm: Tensor
    clipped_gradients: Mapping[str, Tensor]
    learning_rate: float
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class FirstRLOOStep:
    """What one batch of episodes gives; fields and their fields are in the order in which a step makes them.

    Attributes:
        experience: made before the first optimizer step.
        optimizer_steps: ``num_mini_batches`` for each of ``num_ppo_epochs`` epochs.
        logs: what is logged for the batch, by the names of
            https://huggingface.co/docs/trl/v0.21.0/rloo_trainer#explanation-of-the-logged-metrics.
    """

    experience: FirstRLOOExperience
    optimizer_steps: tuple[FirstRLOOOptimizerStep, ...]
    logs: Mapping[str, float]
