"""Which cures a kind of trainer gets, in the order in which they stand: as the cures declare in ``_kinds``."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from pytest_trlcompat.trainers.curing.names import NEEDS, PLACES
from pytest_trlcompat.training import axes

__all__ = ["KINDS", "TRAINERS", "in_order", "kind_named"]

_EXTENDED: Mapping[str, str] = {
    "trainer": "",
    "grpo": "",
    "ppo": "",
    "rloo": "trainer",
    "distillation": "trainer",
    "first_rloo": "trainer",
}
"""Kind of trainer to the kind whose cures it gets as well, at the same places."""


def in_order(
    kind: str, places: Mapping[str, Mapping[str, str]], needs: Mapping[str, Collection[str]]
) -> tuple[str, ...]:
    """The mixins of a kind, each behind those that it must stand behind, and as close to the last of them as it can.

    Where several could be next behind a mixin, the one comes first that fewest in a row follow, so that a new cure
    stands directly behind the one that it names; then the name decides.

    Args:
        places: mixin to the kinds of trainers that get it, each with the mixin that it stands behind there; ``""`` for
            one that stands in front.
        needs: mixin to those that it must stand before, where a kind has them.

    Raises:
        ValueError: a mixin is to stand behind one that trainers of this kind do not get; or the mixins stand in a
            circle.
    """
    behind: dict[str, set[str]] = {}
    for mixin, declared in places.items():
        place = declared.get(kind, declared.get(_EXTENDED[kind]))
        if place is not None:
            behind[mixin] = {place} - {""}
    for mixin, others in behind.items():
        if unknown := others - behind.keys():
            raise ValueError(f"{mixin} is to stand behind {', '.join(unknown)} in {kind}, which has no such cure")
    for mixin, later in needs.items():
        for other in behind.keys() & later if mixin in behind else ():
            behind[other].add(mixin)
    followers: dict[str, list[str]] = {mixin: [] for mixin in behind}
    for mixin, others in behind.items():
        for other in others:
            followers[other].append(mixin)
    rows = dict.fromkeys(behind, 0)
    any_order = tuple(_closest(behind, followers, rows))
    if left := behind.keys() - set(any_order):
        raise ValueError(f"the cures of {kind} stand in a circle: {' behind '.join(_circle(behind, left))}")
    for mixin in reversed(any_order):
        rows[mixin] = 1 + max((rows[follower] for follower in followers[mixin]), default=0)
    return tuple(_closest(behind, followers, rows))


def _circle(behind: Mapping[str, Collection[str]], left: Collection[str]) -> list[str]:
    """Of those that cannot be sorted, each stands behind another one that cannot."""
    path = [min(left)]
    while path[-1] not in path[:-1]:
        path.append(min(other for other in behind[path[-1]] if other in left))
    return path[path.index(path[-1]) :]


def _closest(
    behind: Mapping[str, Collection[str]], followers: Mapping[str, Collection[str]], rows: Mapping[str, int]
) -> Iterator[str]:
    """Go on with what the last mixin has made possible; what was possible before has to wait."""
    missing = {mixin: len(others) for mixin, others in behind.items()}
    possible = [mixin for mixin, number in missing.items() if not number]
    waiting: list[str] = []
    while possible or waiting:
        waiting += sorted(possible, key=lambda mixin: (rows[mixin], mixin), reverse=True)
        mixin = waiting.pop()
        yield mixin
        possible = []
        for follower in followers[mixin]:
            missing[follower] -= 1
            if not missing[follower]:
                possible.append(follower)


class _Kinds(Mapping[str, tuple[str, ...]]):
    """Sorts the mixins of a kind when somebody asks for it: a training asks for one."""

    def __getitem__(self, kind: str) -> tuple[str, ...]:
        if kind not in _EXTENDED:
            raise KeyError(kind)
        return _sorted(kind)

    def __iter__(self) -> Iterator[str]:
        return iter(_EXTENDED)

    def __len__(self) -> int:
        return len(_EXTENDED)

    def __contains__(self, kind: object) -> bool:
        return kind in _EXTENDED


@functools.cache
def _sorted(kind: str) -> tuple[str, ...]:
    # A name and a text without quotes: evaluating them, or a pattern, takes ten times as long.
    places = {}
    for mixin, text in PLACES.items():
        words = text.split('"')[1::2]
        places[mixin] = dict(zip(words[::3], words[1::3], strict=True))
    if unknown := sorted({kind for kinds in places.values() for kind in kinds} - set(_EXTENDED)):
        raise ValueError(f"mixins are declared for kinds of trainers that there are not: {', '.join(unknown)}")
    return in_order(kind, places, {mixin: text.split('"')[1::4] for mixin, text in NEEDS.items()})


KINDS: Mapping[str, tuple[str, ...]] = _Kinds()
"""Kind of trainer to the names of its mixins: ``grpo``, ``ppo`` and ``distillation`` of TRL, ``rloo`` its RLOO from
0.22 on, ``first_rloo`` that up to 0.21, whose training loop is PPO's, and ``trainer`` any other of Transformers'."""

TRAINERS: Mapping[str, str] = MappingProxyType({**axes.TRAINERS, "trainer": "YourTrainer"})
"""What people call a trainer to the name of TRL's class; ``trainer`` is any other, also a user's own."""


def kind_named(trainer: str) -> str:
    """The kind of one of :data:`TRAINERS`, or of what :func:`~pytest_trlcompat.catalog.issue.measured_with` names."""
    return trainer if trainer in KINDS else "trainer"
