"""What TRL's functions make of rows that are packed, or concatenated, without a training. Runs inside a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["MULTIPLE", "flattened", "packed"]

MULTIPLE = 8
"""``pad_to_multiple_of``."""


def packed(lengths: Sequence[int], size: int) -> dict[str, int] | None:
    """How many bins rows need, and into how many ``pack_dataset`` packs them by its default strategy; ``None`` where
    none has a name.

    Args:
        lengths: tokens of each row.
        size: tokens of a bin.
    """
    import inspect

    from datasets import Dataset
    from trl import data_utils

    from pytest_trlcompat import reference

    function: Any = getattr(data_utils, "pack_dataset", None)
    strategy = function and inspect.signature(function).parameters.get("strategy")
    if not strategy:
        return None
    rows = Dataset.from_dict({"input_ids": [[number + 1] * length for number, length in enumerate(lengths)]})
    filled = len(function(rows, size, strategy=strategy.default))
    return {"needed": len(reference.best_fit_bins(lengths, size)), "filled": filled}


def flattened(rows: Sequence[Sequence[int]], multiple: int | None) -> dict[str, list[int]] | None:
    """Ids, positions and labels of rows behind each other, as SFT's collator makes them; ``None`` where it makes none.

    Args:
        rows: token ids.
        multiple: of which the width shall be one; see :data:`MULTIPLE`.
    """
    import inspect

    from trl.trainer import sft_trainer

    collator: Any = getattr(sft_trainer, "DataCollatorForLanguageModeling", None)
    if collator is None or "padding_free" not in inspect.signature(collator).parameters:
        return None
    # Its first argument is the id of padding.
    batch = collator(0, padding_free=True, pad_to_multiple_of=multiple)([{"input_ids": [*row]} for row in rows])
    return {name: batch[name][0].tolist() for name in ("input_ids", "position_ids", "labels")}
