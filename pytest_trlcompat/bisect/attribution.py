"""Delta debugging: the smallest set of changes that alone turns the answer. Pure; imports the standard library alone.

Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002), with its third outcome: versions
that do not go together cannot tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_trlcompat.bisect.search import Answer

__all__ = ["Changes", "changes", "ddmin"]


@dataclass(frozen=True)
class Changes:
    """The difference between two locks.

    Attributes:
        moved: package to its two versions.
        gone: only in the earlier lock.
        came: only in the later lock. A package that came is no change of its own: another one asked for it.
    """

    moved: Mapping[str, tuple[str, str]]
    gone: Mapping[str, str]
    came: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.moved or self.gone or self.came)


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> Changes:
    """What changed from one lock's packages to another's."""
    return Changes(
        {name: (before[name], after[name]) for name in sorted(before) if before[name] != after.get(name, before[name])},
        {name: version for name, version in before.items() if name not in after},
        {name: version for name, version in after.items() if name not in before},
    )


def ddmin(atoms: Sequence[str], ask: Callable[[frozenset[str]], Answer], target: Answer) -> tuple[str, ...]:
    """The smallest set of ``atoms`` that answers ``target``, in which nothing can be left out.

    All of them together are taken to answer it. No set is asked twice. "Smallest" is in the sense that leaving any
    one away does not answer ``target``; sets that cannot tell do not count as answering it.

    Args:
        ask: what the stack says when these atoms alone are changed.
    """
    known: dict[frozenset[str], bool] = {frozenset(atoms): True, frozenset(): False}

    def turns(chosen: Sequence[str]) -> bool:
        key = frozenset(chosen)
        if key not in known:
            known[key] = ask(key) is target
        return known[key]

    current, parts = tuple(atoms), 2
    while len(current) > 1:
        pieces = _split(current, parts)
        smaller = next((piece for piece in pieces if turns(piece)), None)
        if smaller is not None:
            current, parts = smaller, 2
            continue
        rests = [tuple(atom for atom in current if atom not in piece) for piece in pieces]
        rest = next((rest for rest in rests if turns(rest)), None)
        if rest is not None:
            current, parts = rest, max(parts - 1, 2)
        elif parts < len(current):
            parts = min(len(current), 2 * parts)
        else:
            break
    return current


def _split(atoms: tuple[str, ...], parts: int) -> list[tuple[str, ...]]:
    cuts = [round(number * len(atoms) / parts) for number in range(parts + 1)]
    return [atoms[start:end] for start, end in itertools.pairwise(cuts) if start < end]
