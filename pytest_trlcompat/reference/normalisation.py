"""How the losses of tokens become the loss of a step: over completions, tokens, micro-batches and ranks."""

from __future__ import annotations

from torch import Tensor

from pytest_trlcompat.reference.settings import GRPOSettings

__all__ = ["TOKEN_NORMALISED", "token_shares"]

TOKEN_NORMALISED = ("dapo", "cispo")
"""Loss types that are divided by the active tokens of the accumulated batch."""


def token_shares(mask: Tensor, settings: GRPOSettings, *, step_tokens: float, micro_batches: int) -> Tensor:
    """What each token's loss is multiplied by, so that the sum over all tokens of a step is the step's loss.

    For one micro-batch of one rank with ``R`` completions ``o_i``, of ``M`` micro-batches in the step over all ranks:

    ============= ===================== ================================================================
    loss type     share of a token      source
    ============= ===================== ================================================================
    ``grpo``      ``1 / (M R |o_i|)``   mean over completions of the mean over tokens (DeepSeekMath, eq. 3)
    ``sapo``      ``1 / (M R |o_i|)``   the same (SAPO)
    ``bnpo``      ``1 / (M sum |o_j|)`` mean over the tokens of the local batch (its documentation)
    ``dr_grpo``   ``1 / (M R L)``       ``L`` is ``max_completion_length`` (Dr. GRPO, section 3.2)
    ``dapo``      ``1 / N``             ``N`` active tokens of the accumulated batch (DAPO, section 3.3)
    ``cispo``     ``1 / N``             the same (MiniMax-M1)
    ``luspo``     ``1 / (M R)``         as ``grpo``, each completion scaled by its length (LUSPO)
    ``vespo``     ``1 / (M R)``         mean over completions of ``log pi`` of all their tokens (VESPO)
    ============= ===================== ================================================================

    The step's loss is the mean over ranks and micro-batches, which is what data parallelism and gradient accumulation
    do, save where the documentation says that it is one over the accumulated batch.

    Undecided by the documentation: what ``vespo``'s expectation is over, whether completions without a token that
    counts are among the ``R``, and which batch is the "accumulated" one; see
    :class:`~pytest_trlcompat.reference.Undecided`.

    Args:
        mask: ``(R, C)``, tokens that count, of this micro-batch on this rank.
        step_tokens: ``N``.
        micro_batches: ``M``.

    Returns:
        ``(R, C)``, 0 where ``mask`` is false.
    """
    lengths = mask.sum(1, keepdim=True)
    rows = mask.shape[0] if settings.undecided.masked_completions_count else int((lengths > 0).sum())
    kind = settings.loss_type
    if kind in TOKEN_NORMALISED or (kind == "vespo" and settings.undecided.vespo_mean == "tokens"):
        return mask / max(step_tokens, 1)
    if kind == "bnpo":
        return mask / (micro_batches * max(int(mask.sum()), 1))
    shares = mask / (micro_batches * max(rows, 1))
    if kind == "dr_grpo":
        return shares / settings.max_completion_length
    if kind in ("grpo", "sapo"):
        return shares / lengths.clamp(min=1)
    return shares
