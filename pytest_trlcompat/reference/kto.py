"""Kahneman-Tversky optimisation: the loss of completions that are desirable or not, and what is logged of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference.experts import load_balancing_loss
from pytest_trlcompat.reference.preferences import CompletionScores, score_completions
from pytest_trlcompat.reference.settings import check_choices
from pytest_trlcompat.reference.supervised import Batch, Measured, SupervisedSettings, SupervisedUndecided

__all__ = ["UNPAIRED_LOSSES", "KTOObjective", "KTOSettings", "KTOUndecided", "mismatched", "unpaired_losses"]

UNPAIRED_LOSSES = ("kto", "apo_zero_unpaired")
"""The values of ``loss_type``."""
_UNDECIDED: dict[str, tuple[object, ...]] = {
    "counted_logits": ("vocabulary", "tokens", "left_out"),
    "logits_mean": ("tokens", "completions"),
    "margins": ("means", "micro_batches"),
    "mismatch": ("previous", "reversed"),
    "text_start": ("tokenizer", "missing", "none"),
}


@dataclass(frozen=True, kw_only=True)
class KTOUndecided(SupervisedUndecided):
    """What documentation leaves open for KTO; each default is the simplest reading.

    Attributes:
        counted_logits, logits_mean: as for :class:`~pytest_trlcompat.reference.PreferenceUndecided`.
        margins: the difference of the ``"means"`` that are logged of desirable and of other completions, or the mean of
            the differences of those ``"micro_batches"`` that have both.
        mismatch: which completion of its batch a prompt has for the estimate of the divergence: that of the
            ``"previous"`` row, the first row that of the last one; or those of the batch are ``"reversed"``.
        text_start: before a text stand the special tokens that its ``"tokenizer"`` adds, or a beginning of sequence
            where it is ``"missing"`` and the tokenizer has one, also before what a chat template has made; or
            ``"none"``.
    """

    counted_logits: str = "vocabulary"
    logits_mean: str = "tokens"
    margins: str = "means"
    mismatch: str = "previous"
    text_start: str = "tokenizer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class KTOSettings(SupervisedSettings):
    """The arguments of ``KTOConfig`` that decide what a step gives.

    Names and defaults are those of TRL 1.16.0, whose documentation says what they mean:
    https://huggingface.co/docs/trl/kto_trainer.

    Attributes:
        loss_type: one of :data:`UNPAIRED_LOSSES`.
        router_aux_loss_coef: weight of the auxiliary loss of a mixture of experts. Give the model's own where the
            argument is not set.
        undecided: what the documentation leaves open.

    Raises:
        ValueError: for a loss that the documentation does not name.
    """

    loss_type: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    router_aux_loss_coef: float = 0.0
    undecided: KTOUndecided = field(default_factory=KTOUndecided)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"loss_type": UNPAIRED_LOSSES})

    @property
    def estimates_kl(self) -> bool:
        """Whether the loss has a reference point, for which mismatched completions are needed."""
        return self.loss_type == "kto"


def unpaired_losses(log_ratios: Tensor, desirable: Tensor, kl: Tensor, settings: KTOSettings) -> Tensor:
    """The loss of each completion, ``(R,)``, with ``r`` its log-ratio of policy and reference model.

    - ``kto``: ``w (1 - s(beta (r - kl)))`` where it is desirable, ``w (1 - s(beta (kl - r)))`` where it is not.
      Source: KTO, equations 7 and 8, https://arxiv.org/abs/2402.01306.
    - ``apo_zero_unpaired``: ``w (1 - s(beta r))``, and ``w s(beta r)``. Source: APO, https://arxiv.org/abs/2408.06266.

    ``w`` is ``desirable_weight`` or ``undesirable_weight``.

    Args:
        log_ratios: ``(R,)``, in nats.
        desirable: ``(R,)``, booleans.
        kl: the reference point, a scalar without a gradient.
    """
    point = kl if settings.estimates_kl else torch.zeros_like(kl)
    sign = torch.where(desirable, 1.0, -1.0)
    weight = torch.where(desirable, settings.desirable_weight, settings.undesirable_weight)
    return weight * (1.0 - torch.sigmoid(settings.beta * sign * (log_ratios - point)))


def mismatched(completions: Sequence[Any], settings: KTOSettings) -> list[Any]:
    """Of the completions of a batch those that its prompts have for the estimate of the divergence, in their order.

    "Estimated by pairing each prompt with a mismatched completion drawn from elsewhere in the batch", says TRL's
    documentation; with a row more, the paper. Undecided by the documentation: which, see :class:`KTOUndecided`.
    """
    shifted = list(completions)
    return shifted[::-1] if settings.undecided.mismatch == "reversed" else shifted[-1:] + shifted[:-1]


class KTOObjective:
    """An objective of :func:`~pytest_trlcompat.reference.supervised_train` for completions with a label.

    A row has the columns ``ids`` and ``mask``: token ids of the prompt and the completion, and 1 for each token that is
    the completion's; ``label``: 1 where it is desirable, else 0; and, for a loss with a reference point, ``kl_ids`` and
    ``kl_mask``: the same prompt with another completion.

    The reference point of a micro-batch is the mean log-ratio of policy and reference model of all mismatched
    completions on all ranks, without a gradient, and at least 0. The loss of a micro-batch is the mean of its rows,
    that of a step the mean of its micro-batches on all ranks.

    ``values`` of what it gives are log-probabilities of completions: ``logps[chosen]``, ``logps[rejected]``,
    ``logps[kl]``, and each with ``reference_``; ``metrics`` what documentation says is logged:

    - ``kl``: the reference point. ``entropy``: mean over the tokens of completions.
    - ``rewards/chosen``, ``rewards/rejected``: ``beta`` times the log-ratio; ``rewards/margins``: their difference.
    - ``logps/chosen``, ``logps/rejected``; ``logits/chosen``, ``logits/rejected``.
    - ``num_tokens``: tokens of all sequences but the mismatched ones.
    """

    def __init__(self, reference_model: Any, settings: KTOSettings) -> None:
        """
        Args:
            reference_model: the policy as it was before training.
        """
        self.reference_model, self.settings = reference_model, settings

    def __call__(self, model: Any, batches: Sequence[Sequence[Batch]]) -> list[Measured]:
        count = sum(map(len, batches))
        measured = []
        for ranks in batches:
            scored = [self._scored(model, batch) for batch in ranks]
            kl = self._reference_point([batch.kl_ratios for batch in scored])
            margin = self._margin(scored)
            measured += [self._measured(batch, kl, margin, count) for batch in scored]
        return measured

    def _scored(self, model: Any, batch: Batch) -> _Scored:
        settings = self.settings
        desirable = torch.tensor([bool(row["label"][0]) for row in batch])

        def scores(model: Any, ids: str, mask: str, with_routers: bool = False) -> CompletionScores:
            rows = [(row[ids], row[mask]) for row in batch]
            counted = settings.undecided.counted_logits
            return score_completions(model, rows, counted_logits=counted, with_routers=with_routers)

        policy = scores(model, "ids", "mask", bool(settings.router_aux_loss_coef))
        with torch.no_grad():
            reference = scores(self.reference_model, "ids", "mask").logprobs.sum(1)
            # Without a gradient for the policy as well: the reference point is a constant of the loss.
            kl = reference_kl = None
            if settings.estimates_kl:
                kl, reference_kl = (
                    scores(scorer, "kl_ids", "kl_mask").logprobs.sum(1) for scorer in (model, self.reference_model)
                )
        tokens = float(sum(len(row["ids"]) for row in batch))
        return _Scored(policy, policy.logprobs.sum(1), reference, desirable, kl, reference_kl, tokens)

    def _reference_point(self, ratios: Sequence[Tensor | None]) -> Tensor:
        known = [batch_ratios for batch_ratios in ratios if batch_ratios is not None]
        return torch.cat(known).mean().clamp(min=0) if known else torch.tensor(0.0)

    def _margin(self, scored: Sequence[_Scored]) -> float | None:
        """Of a micro-batch on all ranks the mean reward of what is desirable less that of what is not."""
        rewards = self.settings.beta * torch.cat([batch.ratios.detach() for batch in scored])
        desirable = torch.cat([batch.desirable for batch in scored])
        if desirable.all() or not desirable.any():
            return None
        return float(rewards[desirable].mean() - rewards[~desirable].mean())

    def _measured(self, scored: _Scored, kl: Tensor, margin: float | None, count: int) -> Measured:
        settings = self.settings
        loss = unpaired_losses(scored.ratios, scored.desirable, kl, settings).mean()
        metrics = self._metrics(scored)
        metrics["kl"] = float(kl), 1.0
        differences = {}
        if settings.undecided.margins == "means":
            differences["rewards/margins"] = "rewards/chosen", "rewards/rejected"
        elif margin is not None:
            metrics["rewards/margins"] = margin, 1.0
        if settings.router_aux_loss_coef:
            routers = torch.cat(scored.policy.router_logits)
            auxiliary = load_balancing_loss(routers, self.reference_model.config.num_experts_per_tok)
            loss = loss + settings.router_aux_loss_coef * auxiliary
            metrics["aux_loss"] = float(auxiliary.detach()), 1.0
        return Measured(loss / count, loss, scored.values(), {}, metrics, {"num_tokens": scored.tokens}, differences)

    def _metrics(self, scored: _Scored) -> dict[str, tuple[Tensor | float, float]]:
        chose = self.settings.undecided
        rewards, logits = self.settings.beta * scored.ratios.detach(), scored.policy.logits.detach()
        metrics: dict[str, tuple[Tensor | float, float]] = {
            "entropy": (scored.policy.entropies.detach().sum(), float(scored.policy.lengths.sum()))
        }
        for name, chosen in (("chosen", scored.desirable), ("rejected", ~scored.desirable)):
            size = float(chosen.sum())
            metrics[f"rewards/{name}"] = rewards[chosen].sum(), size
            metrics[f"logps/{name}"] = scored.logps.detach()[chosen].sum(), size
            if chose.counted_logits == "left_out":
                continue
            over_tokens = logits[chosen].sum(), float(scored.policy.lengths[chosen].sum())
            by_completion = scored.policy.means(logits)[chosen].sum(), size
            metrics[f"logits/{name}"] = over_tokens if chose.logits_mean == "tokens" else by_completion
        return metrics


@dataclass(frozen=True)
class _Scored:
    """What both models say about the ``R`` rows of a micro-batch on one rank; log-probabilities are ``(R,)``."""

    policy: CompletionScores
    logps: Tensor
    reference: Tensor
    desirable: Tensor
    kl: Tensor | None
    reference_kl: Tensor | None
    tokens: float

    @property
    def ratios(self) -> Tensor:
        return self.logps - self.reference

    @property
    def kl_ratios(self) -> Tensor | None:
        return None if self.kl is None or self.reference_kl is None else self.kl - self.reference_kl

    def values(self) -> Mapping[str, Tensor]:
        values_by_name = {}
        for prefix, values in (("", self.logps), ("reference_", self.reference)):
            values_by_name[f"logps[{prefix}chosen]"] = values[self.desirable]
            values_by_name[f"logps[{prefix}rejected]"] = values[~self.desirable]
        if self.kl is not None and self.reference_kl is not None:
            values_by_name |= {"logps[kl]": self.kl, "logps[reference_kl]": self.reference_kl}
        return values_by_name
