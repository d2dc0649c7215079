"""What GRPO and RLOO log, over all ranks: https://huggingface.co/docs/trl/grpo_trainer#logged-metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pytest_trlcompat.reference.objective import HARD_CLIPPED, clipped
from pytest_trlcompat.reference.records import Generation, MicroBatch
from pytest_trlcompat.reference.rewards import mean_of_present, std_of_present
from pytest_trlcompat.reference.settings import GRPOSettings, SamplingSettings

__all__ = [
    "average_logs",
    "average_over_tokens",
    "clip_ratios",
    "completion_metrics",
    "generation_metrics",
    "mean_over_tokens",
    "part_without_spread",
    "training_metrics",
]

_LAST = ("grad_norm", "learning_rate", "num_tokens", "entropy_coef")


def generation_metrics(
    generation: Generation, names: Sequence[str], settings: SamplingSettings, *, evaluation: bool = False
) -> dict[str, float]:
    """What is logged of completions and rewards, all ranks together.

    - ``completions/...``: see :func:`completion_metrics`.
    - ``rewards/{name}/mean``, ``std``: of one function, over the completions for which it gave a reward.
    - ``reward``: mean of the totals.
    - ``reward_std``: see ``reward_std_over`` of :class:`~pytest_trlcompat.reference.SamplingSettings`.
    - ``frac_reward_zero_std``: the part of the completions in whose group all totals are equal, of two at least;
      undecided by the documentation: ``lone_completion_has_zero_std``.

    The documentation until 0.16 has ``completion_length`` for the first, and that until 1.0 ``reward/{name}``.
    """
    tokens, none = generation.tokens, settings.undecided.no_terminated_length
    logs = completion_metrics(tokens.sampled_lengths, tokens.terminated, none)
    advantages, correction = generation.advantages, settings.undecided.std_correction
    means, stds = (
        mean_of_present(advantages.rewards, 0)[0],
        std_of_present(advantages.rewards, 0, correction=correction)[0],
    )
    counts = (~advantages.rewards.isnan()).sum(0)
    for name, mean, std, count in zip(names, means.tolist(), stds.tolist(), counts.tolist(), strict=True):
        logs[f"rewards/{name}/mean"] = mean
        if count > 1 or settings.undecided.lone_reward_std_logged:
            logs[f"rewards/{name}/std"] = std
    logs["reward"] = float(mean_of_present(advantages.totals, 0))
    logs["reward_std"] = float(advantages.group_stds.mean() if settings.logs_std_of_groups else advantages.batch_std)
    size = (settings.num_generations_eval or settings.num_generations) if evaluation else settings.num_generations
    logs["frac_reward_zero_std"] = part_without_spread(advantages.totals, size, settings)
    return logs


def completion_metrics(lengths: Tensor, ended: Tensor, no_terminated_length: float = 0.0) -> dict[str, float]:
    """What is logged of completions, all ranks together.

    - ``completions/mean_length``, ``min_length``, ``max_length``: tokens up to and including the end of sequence; of
      the excluded ones, too ("generated completions"). "When using tools, only non-tool tokens are counted."
    - ``completions/mean_terminated_length``, ... : of those that have an end of sequence.
    - ``completions/clipped_ratio``: the part that has none.

    Args:
        lengths: ``(R,)``.
        ended: ``(R,)``, which have an end of sequence.
        no_terminated_length: the terminated lengths where none has, which the documentation leaves undecided.
    """
    lengths = lengths.double()
    terminated = lengths[ended]
    logs = {f"completions/{name}_length": float(take(lengths)) for name, take in _STATISTICS.items()}
    for name, take in _STATISTICS.items():
        length = float(take(terminated)) if len(terminated) else no_terminated_length
        logs[f"completions/{name}_terminated_length"] = length
    logs["completions/clipped_ratio"] = 1.0 - len(terminated) / len(lengths)
    return logs


def part_without_spread(rewards: Tensor, size: int, settings: SamplingSettings) -> float:
    """The part of the groups whose rewards are all equal, of two at least.

    Args:
        rewards: ``(R,)``, in groups of ``size`` that follow each other; NaN is left out.
    """
    groups = rewards.reshape(-1, size)
    present = ~groups.isnan()
    # Not by their mean: that of equal numbers may be rounded to another one.
    lowest = groups.where(present, math.inf).amin(1)
    highest = groups.where(present, -math.inf).amax(1)
    equal = (lowest == highest) | ~present.any(1)
    enough = (present.sum(1) > 1) | (size == 1 and settings.undecided.lone_completion_has_zero_std)
    return float((equal & enough).double().mean())


_STATISTICS: Mapping[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "min": torch.min, "max": torch.max}


def training_metrics(
    micro_batches: Sequence[MicroBatch], generations: Sequence[Generation], settings: GRPOSettings
) -> dict[str, float]:
    """What is logged of tokens that are trained on, all micro-batches and ranks together.

    - ``entropy``: mean over tokens; those of excluded completions are left out.
    - ``kl``: mean over the same tokens; where ``beta`` is not 0.
    - ``aux_loss``: mean of the micro-batches' auxiliary losses; where ``router_aux_loss_coef`` is not 0.
    - ``clip_ratio/low_mean``, ``high_mean``, ``region_mean``: the part of the tokens (of the completions, for
      ``importance_sampling_level="sequence"``) that is clipped on the lower bound, the upper one, either.
    - ``clip_ratio/low_min``, ``high_max``: the smallest and the largest part of any completion.

    Clip ratios are those of PPO's clipping: the documentation names none for ``cispo``, ``sapo`` and ``vespo``.
    Undecided by the documentation: ``metrics_mean``, ``clipped_by_sign``, ``clip_extremes_of``,
    ``masked_completions_in_clip_ratios``, ``kl_logged_over`` and ``kl_logged_with_weights``, see
    :class:`~pytest_trlcompat.reference.Undecided`.
    """

    def mean(values: Callable[[MicroBatch], Tensor]) -> float:
        return average_over_tokens([(values(batch), batch.mask) for batch in micro_batches], settings)

    def kl(batch: MicroBatch) -> Tensor:
        assert batch.kl is not None
        is_weighted = settings.use_bias_correction_kl and settings.undecided.kl_logged_with_weights
        return batch.kl * batch.weights if is_weighted else batch.kl

    logs = {"entropy": mean(lambda batch: batch.entropies)}
    if micro_batches[0].kl is not None:
        logs["kl"] = mean(kl)
        if settings.undecided.kl_logged_over == "completions":
            completion_means = [_by_completion([(kl(batch), batch.mask)]) for batch in micro_batches]
            logs["kl"] = sum(map(sum, completion_means)) / max(1, sum(map(len, completion_means)))
    if auxiliary := [float(batch.aux_loss) for batch in micro_batches if batch.aux_loss is not None]:
        logs["aux_loss"] = sum(auxiliary) / len(auxiliary)
    if settings.loss_type in HARD_CLIPPED:
        logs |= _clip_ratios(micro_batches, generations, settings)
    return logs


def _clip_ratios(
    micro_batches: Sequence[MicroBatch], generations: Sequence[Generation], settings: GRPOSettings
) -> dict[str, float]:
    sides, masks = [], []
    for batch in micro_batches:
        advantages = generations[batch.generation].advantages.advantages[list(batch.rows)]
        by_sign = settings.undecided.clipped_by_sign
        low, high = clipped(batch.weights, advantages, settings.epsilon, settings.upper_epsilon, by_sign=by_sign)
        mask = batch.mask
        if settings.importance_sampling_level == "sequence":  # each completion counts once
            mask = mask.any(1, keepdim=True) | settings.undecided.masked_completions_in_clip_ratios
            # (R, 1): the ratio is the same at all tokens of a completion.
            low, high = low[:, :1], high[:, :1]
        sides.append((low, high))
        masks.append(mask)
    return clip_ratios(sides, masks, settings)


def clip_ratios(
    sides: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Tensor], settings: SamplingSettings
) -> dict[str, float]:
    """``clip_ratio/*`` of the micro-batches of all ranks, by time, then by rank.

    Args:
        sides: what is clipped on the lower and on the upper bound, ``(R, C)``, or ``(R, 1)`` of whole completions.
        masks: what counts, of the same shapes.
    """
    lows = [(low.double(), mask) for (low, _), mask in zip(sides, masks, strict=True)]
    highs = [(high.double(), mask) for (_, high), mask in zip(sides, masks, strict=True)]
    # The bounds lie on two sides of 1, so no token is clipped on both.
    both = [(low + high, mask) for (low, mask), (high, _) in zip(lows, highs, strict=True)]
    # By time, then by rank: so many in a row are one micro-batch on all ranks.
    size = len(sides) if settings.undecided.metrics_mean == "tokens" else settings.world_size
    clipped_shares = _by_completion if settings.undecided.clip_extremes_of == "completions" else _by_micro_batch
    smallest = [min(clipped_shares(lows[start : start + size]), default=0.0) for start in range(0, len(lows), size)]
    largest = [max(clipped_shares(highs[start : start + size]), default=0.0) for start in range(0, len(highs), size)]
    return {
        "clip_ratio/low_mean": average_over_tokens(lows, settings),
        "clip_ratio/low_min": sum(smallest) / len(smallest),
        "clip_ratio/high_mean": average_over_tokens(highs, settings),
        "clip_ratio/high_max": sum(largest) / len(largest),
        "clip_ratio/region_mean": average_over_tokens(both, settings),
    }


def average_over_tokens(pairs: Sequence[tuple[Tensor, Tensor]], settings: SamplingSettings) -> float:
    """By ``metrics_mean``, of the values of all ranks' micro-batches: by time, then by rank."""
    way = settings.undecided.metrics_mean
    if way == "micro_batches":
        size = settings.world_size
        parts = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        pairs = [(torch.cat([pair[0] for pair in part]), torch.cat([pair[1] for pair in part])) for part in parts]
    return float(mean_over_tokens(pairs, way == "tokens"))


def _by_completion(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    means: list[float] = []
    for values, mask in pairs:
        counted = mask.any(1)
        means += ((values * mask).sum(1)[counted] / mask.sum(1)[counted]).tolist()
    return means


def _by_micro_batch(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    return [float(mean_over_tokens([pair], True)) for pair in pairs]


def mean_over_tokens(pairs: Sequence[tuple[Tensor, Tensor]], over_all: bool) -> Tensor:
    """Mean of values where masks are true: over all pairs, or the mean of each pair's mean. 0 where nothing counts.

    Args:
        pairs: values and their masks, both ``(R, C)``.
        over_all: whether every token counts the same, wherever it is.
    """
    sums = torch.stack([(values * mask).sum() for values, mask in pairs])
    counts = torch.stack([mask.sum() for _, mask in pairs])
    if over_all:
        return sums.sum() / counts.sum().clamp(min=1)
    return (sums / counts.clamp(min=1)).mean()


def average_logs(logs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What is logged for several steps at once (``logging_steps`` above 1): means over the steps that have a number.

    The last step's for ``num_tokens``, "processed so far", and for ``learning_rate``, ``grad_norm`` and
    ``entropy_coef``, which are of a moment. Undecided by the documentation: the smallest and largest lengths and ratios
    of several steps; they are averaged, too.
    """
    values_of: dict[str, list[float]] = {}
    for entry in logs:
        for name, value in entry.items():
            values_of.setdefault(name, []).append(value)
    return {name: values[-1] if name in _LAST else sum(values) / len(values) for name, values in values_of.items()}
