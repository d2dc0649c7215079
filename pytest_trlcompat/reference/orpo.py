"""Odds ratio preference optimisation: the loss of pairs of completions without a reference model, and what is logged.

Source: Hong et al., ORPO, https://arxiv.org/abs/2403.07691, and the page of the ORPO trainer in TRL's documentation.
Encoder-decoder models are out of scope: a row is one sequence, a prompt and its completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference.experts import load_balancing_loss
from pytest_trlcompat.reference.preference_tokens import preference_row
from pytest_trlcompat.reference.preferences import CompletionScores, score_completions
from pytest_trlcompat.reference.settings import check_choices
from pytest_trlcompat.reference.supervised import Batch, Measured, SupervisedSettings, SupervisedUndecided

__all__ = ["ORPOObjective", "ORPOSettings", "ORPOUndecided", "log_odds_ratios", "orpo_row"]

_CHOICES: dict[str, tuple[object, ...]] = {
    "nll_tokens": ("completion", "sequence"),
    "nll_mean": ("pairs", "tokens"),
}


@dataclass(frozen=True, kw_only=True)
class ORPOUndecided(SupervisedUndecided):
    """What paper and documentation leave open for ORPO, or say differently; each default is the paper's reading.

    Attributes:
        nll_tokens: which tokens the negative log-likelihood is of: those of the ``"completion"``, as the paper's
            ``log P(y|x)`` has it, and documentation, "the SFT part of the loss over chosen responses"; or of the whole
            ``"sequence"``, prompt included, as the authors' code, to which documentation refers, has it by default.
        nll_mean: the mean over ``"pairs"`` of each sequence's mean, the expectation of the paper's equation 6 over its
            equation 3; or the mean over all ``"tokens"`` of a micro-batch, with which longer sequences weigh more, and
            a step depends on how its pairs are split.
    """

    nll_tokens: str = "completion"
    nll_mean: str = "pairs"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _CHOICES)


@dataclass(frozen=True, kw_only=True)
class ORPOSettings(SupervisedSettings):
    """The arguments of ``ORPOConfig`` and ``TrainingArguments`` that decide what a step gives.

    Attributes:
        beta: weight of the odds ratio, "in the paper, it is denoted by λ".
        router_aux_loss_coef: weight of the auxiliary loss of a mixture of experts, as the model's config has it.
    """

    beta: float = 0.1
    router_aux_loss_coef: float = 0.0
    undecided: ORPOUndecided = field(default_factory=ORPOUndecided)


def orpo_row(
    prompt: Sequence[int],
    chosen: Sequence[int],
    rejected: Sequence[int],
    *,
    max_length: int | None = None,
    max_prompt_length: int | None = None,
    max_completion_length: int | None = None,
    truncation_mode: str = "keep_end",
) -> dict[str, tuple[float, ...]]:
    """A row for :class:`ORPOObjective`: both sequences, and which of their tokens are the completion's.

    "First we truncate the prompt; if we're still too long, we truncate the chosen/rejected", says documentation of
    ``tokenize_row``, and of ``truncation_mode`` that it is for a prompt that is too long. A prompt is too long beyond
    ``max_prompt_length``, "maximum length of the prompt"; completions and whole sequences lose their last tokens.

    Args:
        prompt, chosen, rejected: token ids, with the end of sequence where there shall be one.
        max_prompt_length: of releases that have it.
        truncation_mode: whether a prompt keeps its last tokens (``"keep_end"``) or its first (``"keep_start"``).

    Raises:
        ValueError: for another ``truncation_mode``.
    """
    if truncation_mode not in ("keep_start", "keep_end"):
        raise ValueError(f"truncation_mode={truncation_mode!r}; choose one of 'keep_start', 'keep_end'")
    asked = list(prompt)
    if max_prompt_length is not None and len(asked) > max_prompt_length:
        is_start = truncation_mode == "keep_start"
        asked = asked[:max_prompt_length] if is_start else asked[len(asked) - max_prompt_length :]
    return preference_row(asked, chosen, rejected, max_length=max_length, max_completion_length=max_completion_length)


def log_odds_ratios(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``log(odds(y_w|x) / odds(y_l|x))`` of each pair, ``odds = P / (1 - P)``: ``(R,)``. Source: equations 4 and 5.

    Args:
        chosen, rejected: ``(R,)``, mean log-probabilities of a completion's tokens (equation 3), below 0.
    """

    def log_odds(logprobs: Tensor) -> Tensor:
        # expm1 is precise where a probability is near 1, and 1 - exp() is not.
        return logprobs - torch.log(-torch.expm1(logprobs))

    return log_odds(chosen) - log_odds(rejected)


class ORPOObjective:
    """An objective of :func:`~pytest_trlcompat.reference.supervised_train` for pairs of completions.

    ``L = L_SFT + beta L_OR`` (equation 6), ``L_OR = -log sigmoid`` of the log odds ratio (equation 7), and ``L_SFT``
    the negative log-likelihood of the chosen completion. A row has the columns ``chosen``, ``chosen_mask``,
    ``rejected`` and ``rejected_mask``, see :func:`orpo_row`. The loss of a micro-batch is the mean of its pairs, that
    of a step the mean of its micro-batches on all ranks.

    ``values`` of what it gives are ``logps[chosen]`` and ``logps[rejected]``, means over a completion's tokens, and
    ``metrics`` what documentation says is logged:

    - ``logps/chosen``, ``logps/rejected``: these means; ``rewards/chosen``, ``rewards/rejected``: "scaled by beta";
      ``rewards/margins``: their difference; ``rewards/accuracies``: how often the first is larger.
    - ``log_odds_chosen``: the log odds ratio; ``log_odds_ratio``: "``log(sigmoid(log_odds_chosen))``".
    - ``nll_loss``: ``L_SFT``.

    Undecided: ``nll_tokens`` and ``nll_mean`` of :class:`ORPOUndecided`.
    """

    def __init__(self, settings: ORPOSettings, experts_per_token: int = 1) -> None:
        """
        Args:
            experts_per_token: of a mixture of experts, to how many each token goes.
        """
        self.settings, self.experts_per_token = settings, experts_per_token

    def __call__(self, model: Any, batches: Sequence[Sequence[Batch]]) -> list[Measured]:
        count = sum(map(len, batches))
        return [self._measured(model, batch, count) for ranks in batches for batch in ranks]

    def _measured(self, model: Any, batch: Batch, count: int) -> Measured:
        settings = self.settings
        chosen, chosen_mask = self._scores(model, batch, "chosen")
        rejected, rejected_mask = self._scores(model, batch, "rejected")
        chosen_means, rejected_means = _means(chosen.logprobs, chosen_mask), _means(rejected.logprobs, rejected_mask)
        nll = self._nll(chosen, chosen_mask)
        odds = log_odds_ratios(chosen_means, rejected_means)
        loss = nll.mean() - settings.beta * torch.nn.functional.logsigmoid(odds).mean()
        if settings.router_aux_loss_coef:
            routers = torch.cat([*chosen.router_logits, *rejected.router_logits])
            loss = loss + settings.router_aux_loss_coef * load_balancing_loss(routers, self.experts_per_token)
        metrics = _metrics(chosen_means.detach(), rejected_means.detach(), odds.detach(), settings.beta)
        metrics["nll_loss"] = nll.detach().sum(), float(len(nll))
        values = {"logps[chosen]": chosen_means, "logps[rejected]": rejected_means}
        return Measured(loss / count, loss, values, {}, metrics)

    def _scores(self, model: Any, batch: Batch, name: str) -> tuple[CompletionScores, Tensor]:
        """Of all tokens of each sequence, those of the prompt too; and which are the completion's, ``(R, T)``."""
        rows = [(row[name], [1.0] * len(row[name])) for row in batch]
        scores = score_completions(model, rows, with_routers=bool(self.settings.router_aux_loss_coef))
        mask = torch.zeros_like(scores.mask)
        for place, row in enumerate(batch):
            counts = torch.tensor([bool(count) for count in row[f"{name}_mask"][1:]])
            mask[place, : len(counts)] = counts
        return scores, mask

    def _nll(self, chosen: CompletionScores, completion_mask: Tensor) -> Tensor:
        """Negative log-likelihoods whose mean is ``L_SFT``: of each pair ``(R,)``, or of all tokens ``(1,)``."""
        mask = completion_mask if self.settings.undecided.nll_tokens == "completion" else chosen.mask
        if self.settings.undecided.nll_mean == "pairs":
            return -_means(chosen.logprobs, mask)
        return -((chosen.logprobs * mask).sum() / mask.sum().clamp(min=1))[None]


def _means(values: Tensor, mask: Tensor) -> Tensor:
    """Of each row over the tokens that count: ``(R,)``."""
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def _metrics(chosen: Tensor, rejected: Tensor, odds: Tensor, beta: float) -> dict[str, tuple[Tensor | float, float]]:
    size = float(len(chosen))
    sums = {
        "logps/chosen": chosen,
        "logps/rejected": rejected,
        "rewards/chosen": beta * chosen,
        "rewards/rejected": beta * rejected,
        "rewards/margins": beta * (chosen - rejected),
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
        "log_odds_chosen": odds,
        "log_odds_ratio": torch.nn.functional.logsigmoid(odds),
    }
    return {name: (values.sum(), size) for name, values in sums.items()}
