"""Which strategies a stack does not have, whatever is known of issues there. Imports no package of the stack.

A known issue is predicted for the trainer of its suite, and says nothing of a trainer that cannot run at all. Without
this table such a trainer would be called right under a strategy that it does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_trlcompat.catalog.ranges import ALL, Range, parse

__all__ = ["STRATEGIES", "AbsentStrategy"]


@dataclass(frozen=True)
class AbsentStrategy:
    """A strategy that a trainer does not have with some releases.

    Attributes:
        when: by package, the range of these releases; all must hold.
        why: what happens there.
        instead: what to take, as a requirement.
        except_for: trainers that this is not about.
    """

    strategy: str
    when: Mapping[str, str]
    why: str
    instead: str
    except_for: tuple[str, ...] = ()

    def concerns(self, strategy: str, trainer: str = "") -> bool:
        """Whether it is about a strategy, without a variant, and a trainer; without one, about every trainer."""
        return self.strategy == strategy and (not self.except_for or (bool(trainer) and trainer not in self.except_for))

    def is_certain(self, versions: Mapping[str, Range | None]) -> bool:
        """Whether it holds for all versions that a stack may have; what is not there may be any."""
        found = ((versions.get(package), parse(text)) for package, text in self.when.items())
        return all(here is not None and wanted.covers(here) for here, wanted in found)

    def is_possible(self, versions: Mapping[str, Range | None]) -> bool:
        """Whether it holds for some of the versions that a stack may have; ``None``: it is not installed."""
        found = ((versions.get(package, ALL), parse(text)) for package, text in self.when.items())
        return all(here is not None and here.meets(wanted) for here, wanted in found)


STRATEGIES = (
    AbsentStrategy(
        "fsdp2",
        {"accelerate": "<1.6"},
        "Accelerate knows FSDP2 from 1.6.0 on, and takes FSDP1 before without a word",
        "accelerate>=1.6",
    ),
    AbsentStrategy(
        "fsdp2",
        {"transformers": "<4.51"},
        "the Trainer prepares its model without the optimizer, which Accelerate refuses under FSDP2",
        "transformers>=4.51",
        except_for=("ppo", "rloo", "first_rloo"),  # which prepare both; RLOO did until TRL 0.21
    ),
)
