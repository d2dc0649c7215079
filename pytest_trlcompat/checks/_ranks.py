"""How ranks take one decision: a check that fails on one rank fails on all, and nobody is left in a collective.

Imports torch inside functions, and nothing else of this package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["CheckError", "any_rank", "is_first_rank", "listed", "tell_each_other", "together", "world_size"]

_SHOWN = 8
"""How many names a message lists."""
_Told = TypeVar("_Told")


class CheckError(AssertionError):
    """An invariant of training does not hold. Says what was asked, what was found, and what to do."""


def world_size() -> int:
    """Number of ranks; 1 where nothing is distributed."""
    if "torch.distributed" not in sys.modules:  # what is not imported is not initialised
        return 1
    distributed: Any = sys.modules["torch.distributed"]
    ready = distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_world_size()) if ready else 1


def is_first_rank() -> bool:
    """Whether this rank is the one that reads files."""
    import torch.distributed

    return world_size() == 1 or int(torch.distributed.get_rank()) == 0


def any_rank(flags: Sequence[int]) -> list[int]:
    """For each place the bits, of at most 8, that are set on some rank; collective where there are several."""
    told = tell_each_other(bytes(flags))
    highest = 0
    for mine in told:
        highest |= int.from_bytes(mine, "big")
    return list(highest.to_bytes(len(flags), "big"))


def listed(names: Iterable[str]) -> str:
    """How many there are, and the first of them by name."""
    names = list(names)
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} ({', '.join(names[:_SHOWN])}{more})"


@contextmanager
def together(what: str) -> Iterator[None]:
    """Run a block that may raise, then let all ranks raise when any has; collective where there are several.

    The block itself may use collectives only where every rank reaches them whatever the others found.

    Args:
        what: the check's name, for errors that are none of ours.

    Raises:
        CheckError: the block raised on some rank. Every rank gets the same text, which names the ranks.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    told = tell_each_other(_text(what, mine))
    if any(text is not None for text in told):
        raise CheckError(_merged(told)) from mine


def _text(what: str, error: Exception | None) -> str | None:
    if error is None or isinstance(error, CheckError):
        return None if error is None else str(error)
    return f"{what} could not be checked: {type(error).__name__}: {error}"


def tell_each_other(mine: _Told) -> list[_Told]:
    """What each rank told, in their order; collective where there are several."""
    size = world_size()
    if size == 1:
        return [mine]
    import torch.distributed

    told: list[Any] = [None] * size
    torch.distributed.all_gather_object(told, mine)
    return told


def _merged(told: Sequence[str | None]) -> str:
    """One text of all ranks' texts, each said once with the ranks that said it."""
    ranks: dict[str, list[int]] = {}
    for number, text in enumerate(told):
        if text is not None:
            ranks.setdefault(text, []).append(number)
    if len(ranks) == 1 and len(next(iter(ranks.values()))) == len(told):
        return next(iter(ranks))
    return "\n".join(
        f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of {len(told)}: {text}"
        for text, numbers in ranks.items()
    )
