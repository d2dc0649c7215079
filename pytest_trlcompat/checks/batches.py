"""Do ranks train on batches of their own?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_trlcompat.checks._ranks import OddError, gather_from_ranks

__all__ = ["check_batches", "shares_batches"]


def check_batches(mine: Sequence[int | None], *, may_repeat: bool = False) -> dict[str, int]:
    """No two ranks had the same batches, and no rank had each batch twice in succession; collective.

    GRPO gives ranks the same prompts on purpose; their completions, which belong to the batch, are drawn and differ.

    Args:
        mine: fingerprints of this rank's first batches, in order, at least four; ``None`` for one that has none.
        may_repeat: accept repeated batches, because one generation may serve several steps.

    Returns:
        ``batches``, the number that were compared, and ``ranks``.

    Raises:
        OddError: on every rank: ranks had the same batches, or a rank had each batch twice.
    """
    everyone = gather_from_ranks((tuple(mine), may_repeat))
    count = min(len(batches) for batches, _ in everyone)
    report = {"batches": count, "ranks": len(everyone)}
    if any(None in batches for batches, _ in everyone):
        return {**report, "batches": 0}
    seen: dict[tuple[int | None, ...], list[int]] = {}
    for number, (batches, _) in enumerate(everyone):
        seen.setdefault(batches[:count], []).append(number)
    same = [ranks for ranks in seen.values() if len(ranks) > 1]
    if same:
        ranks = ", ".join(map(str, same[0]))
        raise OddError(
            f"expected each rank to train on batches of its own, but ranks {ranks} of {len(everyone)} had the same "
            f"{count}: is the data loader prepared for several processes, and does each rank draw its own completions?",
            report,
        )
    if again := [number for number, (batches, may) in enumerate(everyone) if not may and _repeats(batches[:count])]:
        raise OddError(
            f"expected new batches, but on rank {again[0]} each of the first {count} came twice in succession: do the "
            "workers of the data loader draw the same random numbers?",
            report,
        )
    return report


def _repeats(batches: Sequence[int | None]) -> bool:
    """Whether of at least two pairs both halves are the same."""
    pairs = list(zip(batches[::2], batches[1::2], strict=False))
    return len(pairs) >= 2 and all(first == second for first, second in pairs)


def shares_batches(trainer: Any) -> bool:
    """Whether ranks may have the same batch on purpose: tensor, context or sequence parallel."""
    accelerator = trainer.accelerator
    parallel = getattr(accelerator, "parallelism_config", None) or getattr(trainer.args, "parallelism_config", None)
    if any((getattr(parallel, f"{kind}_size", 1) or 1) > 1 for kind in ("tp", "cp", "sp")):
        return True
    model = getattr(trainer, "model", None)
    if (getattr(model, "tp_size", None) or getattr(model, "_tp_size", None) or 1) > 1:
        return True
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    config = getattr(plugin, "deepspeed_config", None) or {}
    return int(config.get("sequence_parallel_size", 1) or 1) > 1
