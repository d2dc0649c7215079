"""The strategies that a stack does not have, as version ranges: those that a launch refuses.

A known issue is predicted for the trainer of its suite, and says nothing about a trainer that cannot run at all.
Without this table the doctor would call such a trainer right under a strategy that it does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_trlcompat.catalog.ranges import ALL, Range, parse
from pytest_trlcompat.strategies import families

__all__ = ["STRATEGIES", "AbsentStrategy"]


@dataclass(frozen=True)
class AbsentStrategy:
    """A strategy that a trainer does not have with some releases.

    Attributes:
        when: by package, the range of these releases; all must hold.
        why: what happens there.
        instead: what to take, as a requirement.
        except_for: trainers that this is not about.
        is_assumed_present: whether a stack that does not name the package is taken to have a release with the strategy.
    """

    strategy: str
    when: Mapping[str, str]
    why: str
    instead: str
    except_for: tuple[str, ...] = ()
    is_assumed_present: bool = False

    def concerns(self, strategy: str, trainer: str = "") -> bool:
        """Whether it is about a strategy, without a variant, and a trainer; without one, about every trainer."""
        return self.strategy == strategy and (not self.except_for or (bool(trainer) and trainer not in self.except_for))

    def is_certain(self, versions: Mapping[str, Range | None]) -> bool:
        """Whether it holds for all versions that a stack may have; a package that is not named may have any version."""
        pairs = ((versions.get(package), parse(text)) for package, text in self.when.items())
        return all(here is not None and absent.covers(here) for here, absent in pairs)

    def is_possible(self, versions: Mapping[str, Range | None]) -> bool:
        """Whether it holds for some of the versions that a stack may have; ``None``: it is not installed."""
        pairs = ((versions.get(package, ALL), parse(text)) for package, text in self.when.items())
        return all(
            here is not None and here.meets(absent) and not (self.is_assumed_present and here == ALL)
            for here, absent in pairs
        )


STRATEGIES = tuple(
    AbsentStrategy(
        name, {need.package: f"<{need.since}"}, need.reason, need.requirement, need.except_for, need.is_assumed
    )
    for family in families()
    for name in family.names
    for need in family.needs
)
"""What families of strategies say that they need."""
