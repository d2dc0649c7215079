"""Which strategies a stack does not have, whatever is known of issues there. Imports no package of the stack.

A known issue is predicted for the trainer of its suite, and says nothing of a trainer that cannot run at all. Without
this table such a trainer would be called right under a strategy that it does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_trlcompat.catalog.ranges import Range, parse

__all__ = ["STRATEGIES", "AbsentStrategy", "absent_strategy"]


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
        except_for=("ppo", "first_rloo"),  # which prepare both themselves
    ),
)


def absent_strategy(name: str, versions: Mapping[str, Range | None], trainer: str = "") -> AbsentStrategy | None:
    """Why a stack has no such strategy; ``None`` where it has, or where that is not certain.

    Args:
        name: of the strategy, without a variant.
        versions: of the stack, by package; what is not there may be any.
        trainer: the one that is asked about; empty: only what every trainer lacks counts.
    """
    for absence in STRATEGIES:
        if absence.strategy != name or (absence.except_for and (not trainer or trainer in absence.except_for)):
            continue
        found = {package: versions.get(package) for package in absence.when}
        if all(here is not None and parse(absence.when[package]).covers(here) for package, here in found.items()):
            return absence
    return None
