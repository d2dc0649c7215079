"""Direct preference optimisation: the loss of pairs of completions, from their tokens on, and what is logged of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pytest_trlcompat.reference._stepping import detached
from pytest_trlcompat.reference._together import output_of_rows, widened
from pytest_trlcompat.reference.experts import load_balancing_loss
from pytest_trlcompat.reference.inputs import tensors_of
from pytest_trlcompat.reference.optimizer import mix_weights
from pytest_trlcompat.reference.preference_losses import PairScores, pair_losses, pair_weights
from pytest_trlcompat.reference.preference_settings import PreferenceSettings
from pytest_trlcompat.reference.supervised import Batch, Measured

__all__ = ["CompletionScores", "PreferenceObjective", "score_completions", "synchronised"]


@dataclass(frozen=True)
class CompletionScores:
    """What a model says about the tokens of ``R`` completions; 0 where ``mask`` is false.

    Attributes:
        mask: ``(R, T)``: tokens of the completion that have one before them.
        logprobs, entropies: ``(R, T)``, in nats.
        collisions: ``(R, T)``, ``log sum_v pi(v)^2``.
        logits: ``(R, T)``: the token's own, or the mean over the vocabulary, see ``counted_logits``.
        hits: ``(R, T)``: whether the token is the likeliest.
        router_logits: of a mixture of experts, of each row ``(layers x tokens, experts)``.
    """

    mask: Tensor
    logprobs: Tensor
    entropies: Tensor
    collisions: Tensor
    logits: Tensor
    hits: Tensor
    router_logits: tuple[Tensor, ...] = ()

    @property
    def lengths(self) -> Tensor:
        """``(R,)``"""
        return self.mask.sum(1)

    def means(self, values: Tensor) -> Tensor:
        """Of each completion, over its tokens: ``(R,)``."""
        return (values * self.mask).sum(1) / self.lengths.clamp(min=1)


def score_completions(
    model: Any,
    rows: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    counted_logits: str = "vocabulary",
    with_routers: bool = False,
    inputs: Sequence[Mapping[str, Any] | None] = (),
) -> CompletionScores:
    """Score the completion in each row. Each goes through the model without padding in front of it.

    Args:
        model: called with ``input_ids`` and ``attention_mask``, both ``(rows, tokens)``; returns an object that
            has ``logits``.
        rows: token ids of prompt and completion, and 1 for each that is the completion's.
        with_routers: ask for the logits of experts' routers, too.
        inputs: of each row, further inputs of the model by name, such as images, as nested lists. Then each row goes
            through the model alone.

    Raises:
        ValueError: ``with_routers`` and ``inputs`` together.
    """
    padded: dict[str, list[Tensor]] = {name: [] for name in _OF_TOKENS}
    routers: list[Tensor] = []
    if any(inputs):
        if with_routers:
            raise ValueError("the logits of routers are asked of rows without further inputs alone")
        pairs = zip(rows, inputs, strict=True)
        predicting = iter(_with_inputs(model, [(ids, more) for (ids, _), more in pairs if len(ids) > 1]))
    else:
        predicting = iter(_outputs(model, [ids for ids, _ in rows if len(ids) > 1], routers if with_routers else None))
    width = max(1, *(len(ids) for ids, _ in rows))
    for token_ids, counts in rows:
        if len(token_ids) < 2:  # nothing has a token before it
            for name in _OF_TOKENS:
                padded[name].append(_nothing(model, width - 1, is_mask=name == "mask"))
            continue
        # Logits at a token are of the next one: none predict the first token, and the last ones predict no token.
        logits, following = next(predicting)[:-1], _ids(token_ids)[1:]
        logprobs = torch.log_softmax(logits, -1)
        mask = torch.tensor([bool(count) for count in counts[1:]], dtype=torch.bool)
        token_logits = logits.gather(-1, following[:, None]).squeeze(-1)
        of_row = {
            "logprobs": logprobs.gather(-1, following[:, None]).squeeze(-1),
            "entropies": -(logprobs.exp() * logprobs).sum(-1),
            "collisions": torch.logsumexp(2 * logprobs, -1),
            "logits": token_logits if counted_logits == "tokens" else logits.mean(-1),
            "hits": (logits.argmax(-1) == following).to(logits.dtype),
        }
        for name, values in of_row.items():
            padded[name].append(_wide(values.where(mask, 0.0), width - 1))
        padded["mask"].append(_wide(mask, width - 1))
    return CompletionScores(
        **{name: torch.stack(rows_of_values) for name, rows_of_values in padded.items()}, router_logits=tuple(routers)
    )


def _ids(row: Sequence[float]) -> Tensor:
    return torch.tensor([int(token) for token in row])


def _outputs(model: Any, rows: Sequence[Sequence[float]], routers: list[Tensor] | None) -> list[Tensor]:
    """The logits of each row.

    Args:
        routers: gets the logits of experts' routers of each row, which then goes through the model alone: its padding
            would be counted among them.
    """
    sequences = [_ids(row) for row in rows]
    if routers is None:
        return output_of_rows(model, sequences) if rows else []
    device, logits = next(model.parameters()).device, []
    for ids in sequences:
        output = model(
            input_ids=ids[None].to(device),
            attention_mask=torch.ones_like(ids)[None].to(device),
            output_router_logits=True,
        )
        routers.append(torch.cat([layer_logits.cpu() for layer_logits in output.router_logits]))
        logits.append(widened(output.logits[0].cpu()))
    return logits


def _with_inputs(model: Any, rows: Sequence[tuple[Sequence[float], Mapping[str, Any] | None]]) -> list[Tensor]:
    """The logits of each row, which is called with its own inputs."""
    device, logits = next(model.parameters()).device, []
    for row, row_inputs in rows:
        ids = _ids(row)[None].to(device)
        more = {name: tensor.to(device) for name, tensor in tensors_of(row_inputs).items()}
        logits.append(widened(model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits[0].cpu()))
    return logits


_OF_TOKENS = ("mask", "logprobs", "entropies", "collisions", "logits", "hits")


def _nothing(model: Any, width: int, *, is_mask: bool) -> Tensor:
    # As ``widened`` leaves logits: those of a 16-bit model are computed with in 32 bits.
    kind = next(model.parameters()).dtype
    return torch.zeros(width, dtype=torch.bool if is_mask else kind if kind is torch.float64 else torch.float32)


def _wide(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - len(values)))


class PreferenceObjective:
    """An objective of :func:`~pytest_trlcompat.reference.supervised_train` for pairs of completions.

    A row has the columns ``chosen``, ``chosen_mask``, ``rejected`` and ``rejected_mask``: token ids of the prompt and
    the completion, and 1 for each token that is the completion's; perhaps ``chosen_inputs`` and ``rejected_inputs``,
    further inputs of the model by name, such as images, as nested lists. The loss of a micro-batch is the mean of its
    pairs, that of a step the mean of its micro-batches on all ranks.

    ``values`` of what it gives are the log-probabilities of each completion, ``logps[chosen]`` and so on, and
    ``metrics`` what documentation says is logged:

    - ``rewards/chosen``, ``rewards/rejected``: ``beta`` times the log-ratio of policy and reference model;
      ``rewards/margins``: their difference; ``rewards/accuracies``: how often the first is larger.
    - ``logps/chosen``, ``logps/rejected``: log-probabilities of completions.
    - ``logits/chosen``, ``logits/rejected``: see ``counted_logits`` and ``logits_mean`` of
      :class:`~pytest_trlcompat.reference.PreferenceUndecided`.
    - ``entropy``: mean over the tokens of both completions; ``mean_token_accuracy``: how many tokens of the chosen one
      are the likeliest.
    - ``num_tokens``: tokens of both sequences, prompts included.
    """

    def __init__(self, reference_model: Any, settings: PreferenceSettings) -> None:
        """
        Args:
            reference_model: the policy as it was before training.
        """
        self.reference_model, self.settings = reference_model, settings
        self.shift_total, self.shift_count = 0.0, 0

    def __call__(self, model: Any, batches: Sequence[Sequence[Batch]]) -> list[Measured]:
        # Micro-batches of all ranks: the loss of a step is their mean.
        count = sum(map(len, batches))
        measured = []
        for ranks in batches:
            pairs = [self._scored(model, batch) for batch in ranks]
            shift = self._shift([scored[2] for scored in pairs])
            measured += [self._measured(*scored, shift=shift, count=count) for scored in pairs]
        return measured

    def _scored(self, model: Any, batch: Batch) -> tuple[CompletionScores, CompletionScores, PairScores, float]:
        settings = self.settings
        with_routers = bool(settings.router_aux_loss_coef)

        def scores(model: Any, name: str, with_routers: bool) -> CompletionScores:
            rows = [(row[name], row[f"{name}_mask"]) for row in batch]
            counted = settings.undecided.counted_logits
            inputs = [row.get(f"{name}_inputs") for row in batch]
            return score_completions(
                model, rows, counted_logits=counted, with_routers=with_routers, inputs=inputs if any(inputs) else ()
            )

        chosen, rejected = scores(model, "chosen", with_routers), scores(model, "rejected", with_routers)
        sums = self._sums(chosen, rejected, True)
        if settings.reference_free:
            reference = torch.zeros_like(sums[0]), torch.zeros_like(sums[1])
        else:
            with torch.no_grad():
                both = scores(self.reference_model, "chosen", False), scores(self.reference_model, "rejected", False)
            reference = self._sums(*both, settings.undecided.length_desensitized_reference)
        tokens = sum(len(row["chosen"]) + len(row["rejected"]) for row in batch)
        return chosen, rejected, PairScores(*sums, *reference, chosen.lengths, rejected.lengths), float(tokens)

    def _sums(self, chosen: CompletionScores, rejected: CompletionScores, desensitized: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities of completions; with ``ld_alpha`` what is beyond the shorter one's length counts less.

        Source: Liu et al., LD-DPO, https://arxiv.org/abs/2409.06411.
        """
        alpha = self.settings.ld_alpha
        if alpha is None or not desensitized:
            return chosen.logprobs.sum(1), rejected.logprobs.sum(1)
        shared = torch.minimum(chosen.lengths, rejected.lengths)[:, None]
        sums = []
        for scores in (chosen, rejected):
            # The number of each token within its completion, from 1 on.
            places = scores.mask.cumsum(1)
            weights = torch.where(places <= shared, 1.0, alpha)
            sums.append((scores.logprobs * weights).sum(1))
        return sums[0], sums[1]

    def _shift(self, pairs: Sequence[PairScores]) -> Tensor:
        """The mean reward of both completions, over all ranks, without a gradient: ``d`` of ``bco_pair``."""
        if self.settings.undecided.reward_shift == "none":
            return torch.tensor(0.0)
        rewards = torch.cat([torch.cat([scores.chosen_ratios, scores.rejected_ratios]) for scores in pairs]).detach()
        mean = self.settings.beta * rewards.mean()
        if self.settings.undecided.reward_shift == "batch":
            return mean
        # The mean over all batches so far, each reward counted once.
        self.shift_total += float(mean) * len(rewards)
        self.shift_count += len(rewards)
        return torch.tensor(self.shift_total / self.shift_count)

    def _measured(
        self,
        chosen: CompletionScores,
        rejected: CompletionScores,
        pairs: PairScores,
        tokens: float,
        *,
        shift: Tensor,
        count: int,
    ) -> Measured:
        settings = self.settings
        nll = self._nll(chosen)
        losses = torch.zeros_like(pairs.chosen)
        weights = torch.ones_like(pairs.chosen)
        if settings.use_weighting:
            log_weights = [scores.means(scores.logprobs - scores.collisions) for scores in (chosen, rejected)]
            weights = pair_weights(log_weights[0], log_weights[1], settings)
        for loss_type, weight in settings.weighted_losses:
            if loss_type == "sft":
                losses = losses + weight * nll * (weights if settings.undecided.nll_weighted else 1.0)
            else:
                losses = losses + weight * weights * pair_losses(pairs, loss_type, settings, shift)
        if settings.rpo_alpha is not None:
            losses = losses + settings.rpo_alpha * nll
        loss = losses.mean()
        metrics = self._metrics(chosen, rejected, detached(pairs))
        if settings.rpo_alpha is not None or "sft" in settings.loss_type:
            metrics["nll_loss"] = float(nll.detach().mean()), 1.0
        if settings.router_aux_loss_coef:
            routers = torch.cat([*chosen.router_logits, *rejected.router_logits])
            auxiliary = load_balancing_loss(routers, self.experts_per_token)
            loss = loss + settings.router_aux_loss_coef * auxiliary
            metrics["aux_loss"] = float(auxiliary.detach()), 1.0
        names = ["chosen", "rejected"]
        names += [] if settings.reference_free else ["reference_chosen", "reference_rejected"]
        shown = pairs.per_token() if self._logs_averages else pairs
        values = {f"logps[{name}]": getattr(shown, name) for name in names}
        return Measured(loss / count, loss, values, {}, metrics, {"num_tokens": tokens})

    @property
    def _logs_averages(self) -> bool:
        return "ipo" in self.settings.loss_type and self.settings.undecided.ipo_averages_logged

    @property
    def experts_per_token(self) -> int:
        count: int = self.reference_model.config.num_experts_per_tok
        return count

    def _nll(self, chosen: CompletionScores) -> Tensor:
        """The negative log-likelihood of each chosen completion, ``(B,)``, or of all their tokens, a scalar."""
        if self.settings.undecided.nll_mean == "tokens":
            return -chosen.logprobs.sum() / chosen.lengths.sum().clamp(min=1)
        return -chosen.means(chosen.logprobs)

    def _metrics(
        self, chosen: CompletionScores, rejected: CompletionScores, pairs: PairScores
    ) -> dict[str, tuple[Tensor | float, float]]:
        settings = self.settings
        chose = settings.undecided
        if self._logs_averages:
            pairs = pairs.per_token()
        better, worse = settings.beta * pairs.chosen_ratios, settings.beta * pairs.rejected_ratios
        size = float(len(better))
        metrics: dict[str, tuple[Tensor | float, float]] = {
            "rewards/chosen": (better.sum(), size),
            "rewards/rejected": (worse.sum(), size),
            "rewards/margins": ((better - worse).sum(), size),
            "rewards/accuracies": ((better > worse).sum(), size),
            "logps/chosen": (pairs.chosen.sum(), size),
            "logps/rejected": (pairs.rejected.sum(), size),
        }
        for name, scores in (("chosen", chosen), ("rejected", rejected)):
            if chose.counted_logits == "left_out":
                continue
            over_tokens = scores.logits.detach().sum(), float(scores.lengths.sum())
            by_completion = scores.means(scores.logits.detach()).sum(), size
            metrics[f"logits/{name}"] = over_tokens if chose.logits_mean == "tokens" else by_completion
        entropies = chosen.entropies.detach().sum() + rejected.entropies.detach().sum()
        metrics["entropy"] = entropies, float(chosen.lengths.sum() + rejected.lengths.sum())
        metrics["mean_token_accuracy"] = chosen.hits.sum(), float(chosen.lengths.sum())
        return metrics


class _Synchronised(Protocol):
    """Settings with the arguments of a reference model that follows the policy."""

    @property
    def sync_ref_model(self) -> bool: ...

    @property
    def ref_model_mixup_alpha(self) -> float: ...

    @property
    def ref_model_sync_steps(self) -> int: ...


def synchronised(reference_model: Any, settings: _Synchronised) -> Callable[[Any, int], None]:
    """What ``sync_ref_model`` does: mix the policy into the reference model every ``ref_model_sync_steps`` steps.

    ``pi_ref = alpha pi + (1 - alpha) pi_ref``. Source: ``ref_model_mixup_alpha`` of ``DPOConfig`` and ``KTOConfig``;
    TR-DPO.
    """

    def after_step(model: Any, steps: int) -> None:
        if not settings.sync_ref_model or steps % settings.ref_model_sync_steps:
            return
        parameters: Mapping[str, Tensor] = dict(reference_model.named_parameters())
        with torch.no_grad():
            mixed = mix_weights(dict(model.named_parameters()), parameters, settings.ref_model_mixup_alpha)
            for name, weight in mixed.items():
                parameters[name].copy_(weight)

    return after_step
