"""How the name of a strategy is read: a family's strategy, the dimensions that it is composed with, and a variant.

A family says how ranks share a batch and its model. Tensor, context and sequence parallelism and hybrid sharding divide
the same ranks once more, whichever family does the rest: ``fsdp2-tp``, ``zero3-sp``. None of them can be launched yet.
"""

from __future__ import annotations

from functools import cache

__all__ = ["DIMENSIONS", "parts_of", "without_variant"]

DIMENSIONS: tuple[str, ...] = ()
"""What may follow the strategy of a family in a name. A dimension that can be launched is added here; any other word is
a variant, which a suite gives its labels: ``fsdp1-no_shard``."""


def parts_of(label: str) -> tuple[str, tuple[str, ...], str]:
    """The strategy of a family, the dimensions that follow it, and the variant, empty where there is none.

    ``("fsdp2", ("tp",), "lora")`` of ``fsdp2-tp-lora``, where ``tp`` is a dimension.
    """
    base, *words = label.split("-")
    number = next((place for place, word in enumerate(words) if word not in DIMENSIONS), len(words))
    return base, tuple(words[:number]), "-".join(words[number:])


# An answer of the doctor asks this thousands of times, about some dozens of labels.
@cache
def without_variant(label: str) -> str:
    """The name of the strategy: ``fsdp1`` of ``fsdp1-no_shard``."""
    base, dimensions, _ = parts_of(label)
    return "-".join((base, *dimensions))
