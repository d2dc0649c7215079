"""Which cures a kind of trainer gets, in the order in which they stand: as the cures declare in ``_kinds``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from pytest_trlcompat.trainers.curing.names import PLACES
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
_PLACE = re.compile(r'"(\w+)": (\d+)')


def in_order(kind: str, places: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    """The mixins of a kind by their places.

    Raises:
        ValueError: two of them have the same place, so that nothing says which stands in front.
    """
    by_place: dict[int, str] = {}
    for mixin, kinds in places.items():
        place = kinds.get(kind, kinds.get(_EXTENDED[kind]))
        if place is not None and by_place.setdefault(place, mixin) != mixin:
            raise ValueError(f"{by_place[place]} and {mixin} both have the place {place} in {kind}")
    return tuple(by_place[place] for place in sorted(by_place))


def _kinds() -> Mapping[str, tuple[str, ...]]:
    places = {mixin: {kind: int(place) for kind, place in _PLACE.findall(text)} for mixin, text in PLACES.items()}
    if unknown := sorted({kind for kinds in places.values() for kind in kinds} - set(_EXTENDED)):
        raise ValueError(f"mixins are declared for kinds of trainers that there are not: {', '.join(unknown)}")
    return MappingProxyType({kind: in_order(kind, places) for kind in _EXTENDED})


KINDS: Mapping[str, tuple[str, ...]] = _kinds()
"""Kind of trainer to the names of its mixins: ``grpo``, ``ppo`` and ``distillation`` of TRL, ``rloo`` its RLOO from
0.22 on, ``first_rloo`` that up to 0.21, whose training loop is PPO's, and ``trainer`` any other of Transformers'."""

TRAINERS: Mapping[str, str] = MappingProxyType({**axes.TRAINERS, "trainer": "YourTrainer"})
"""What people call a trainer to the name of TRL's class; ``trainer`` is any other, also a user's own."""


def kind_named(trainer: str) -> str:
    """The kind of one of :data:`TRAINERS`, or of what :func:`~pytest_trlcompat.catalog.issue.measured_with` names."""
    return trainer if trainer in KINDS else "trainer"
