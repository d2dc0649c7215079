"""Joint decisions of ranks: a check that fails on one rank fails on all, and no rank waits in a collective for good."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = [
    "AbandonedError",
    "CheckError",
    "OddError",
    "any_rank",
    "gather_from_ranks",
    "is_first_rank",
    "jointly",
    "listed",
    "rank",
    "together",
    "world_size",
]

_SHOWN = 8
"""How many names a message lists."""
_Value = TypeVar("_Value")


class CheckError(AssertionError):
    """An invariant of training does not hold. Says what was expected, what was found, and what to do.

    Attributes:
        found: what the check measured before it failed, or ``None``.
    """

    def __init__(self, text: str, found: Any = None) -> None:
        super().__init__(text)
        self.found = found


class OddError(CheckError):
    """What looks odd but may be meant, or costs memory alone, or could not be checked.

    A function raises it, since whoever calls one asserts something; the callback never ends a training by it.
    """


class AbandonedError(Exception):
    """A check itself failed, on some rank or on all, and every rank has left it at the same point."""


@dataclass(frozen=True)
class _Failed:
    """What a rank that cannot go on sends in place of the value that the others wait for."""

    text: str


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    if "torch.distributed" not in sys.modules:  # not imported, so not initialised
        return 1
    distributed: Any = sys.modules["torch.distributed"]
    ready = distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_world_size()) if ready else 1


def is_first_rank() -> bool:
    """Whether this rank is the one that reads files."""
    return rank() == 0


def rank() -> int:
    """This process's number; 0 without a process group."""
    if world_size() == 1:
        return 0
    import torch.distributed

    return int(torch.distributed.get_rank())


def any_rank(flags: Sequence[int]) -> list[int]:
    """Combine each flag (at most 8 bits) of all ranks by OR; collective if there are several."""
    highest = 0
    for mine in gather_from_ranks(bytes(flags)):
        highest |= int.from_bytes(mine, "big")
    return list(highest.to_bytes(len(flags), "big"))


def listed(names: Iterable[str]) -> str:
    """The number of names, and the first of them."""
    names = list(names)
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} ({', '.join(names[:_SHOWN])}{more})"


@contextmanager
def together(what: str) -> Iterator[None]:
    """Run a block that may raise, then raise on all ranks if any has; collective if there are several.

    The block itself may use collectives only if every rank reaches them, whatever the others find.

    Args:
        what: the name of the check, for errors other than CheckError.

    Raises:
        CheckError: the block raised one on some rank. Every rank gets the same text, which names the ranks.
        OddError: no rank raised a CheckError that is none, but some raised an OddError or another exception: then the
            check itself has failed, which says nothing of the training.
    """
    mine: Exception | None = None
    try:
        yield
    except AbandonedError:
        # Every rank has left at the same collective, so none waits for a report here.
        raise
    except Exception as error:
        mine = error
    reports = gather_from_ranks((_text(what, mine), not _is_odd(mine)))
    texts = [text for text, _ in reports]
    if any(text is not None for text in texts):
        certain = any(text is not None and is_certain for text, is_certain in reports)
        raise (CheckError if certain else OddError)(_merged(texts), getattr(mine, "found", None)) from mine


def _is_odd(error: Exception | None) -> bool:
    return isinstance(error, OddError) or not isinstance(error, CheckError)


def _text(what: str, error: Exception | None) -> str | None:
    if error is None or isinstance(error, CheckError):
        return None if error is None else str(error)
    return f"{what} could not be checked: {type(error).__name__}: {error}"


@contextmanager
def jointly(what: str) -> Iterator[None]:
    """Run a block that uses collectives of this module, and leave it on all ranks if it fails on one.

    A rank on which it fails says so in the next collective that the others reach, or else at the end of the block.
    Collective if there are several ranks.

    Raises:
        AbandonedError: on every rank: the block raised something other than a :class:`CheckError` on some.
    """
    try:
        yield
    except (AbandonedError, CheckError):
        raise
    except Exception as error:
        text = f"{what} could not be checked: {type(error).__name__}: {error}"
        gather_from_ranks(_Failed(text))  # raises where there are several ranks
        raise AbandonedError(text) from error
    gather_from_ranks(None)


def gather_from_ranks(mine: _Value) -> list[_Value]:
    """The values of all ranks, by rank; collective if there are several.

    Raises:
        AbandonedError: on every rank: a check failed on one of them. See :func:`jointly`.
    """
    size = world_size()
    if size == 1:
        return [mine]
    import torch.distributed

    values: list[Any] = [None] * size
    torch.distributed.all_gather_object(values, mine)
    if any(isinstance(value, _Failed) for value in values):
        raise AbandonedError(_merged([value.text if isinstance(value, _Failed) else None for value in values]))
    return values


def _merged(texts: Sequence[str | None]) -> str:
    """Merge the texts of all ranks; each appears once, with its ranks."""
    ranks: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        if text is not None:
            ranks.setdefault(text, []).append(number)
    if len(ranks) == 1 and len(next(iter(ranks.values()))) == len(texts):
        return next(iter(ranks))
    return "\n".join(
        f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of {len(texts)}: {text}"
        for text, numbers in ranks.items()
    )
