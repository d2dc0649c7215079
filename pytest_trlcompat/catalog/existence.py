"""Which strategies a stack does not have, whatever is known of issues there. Imports no package of the stack.

A known issue is predicted for the trainer of its suite, and says nothing of a trainer that cannot run at all. Without
this table such a trainer would be called right under a strategy that it does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pytest_trlcompat.catalog.ranges import ALL, Range, parse

__all__ = ["STRATEGIES", "AbsentStrategy", "absent_strategy", "partly_absent_strategies"]


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
        except_for=("ppo", "rloo", "first_rloo"),  # which prepare both; RLOO did until TRL 0.21
    ),
)


def absent_strategy(name: str, versions: Mapping[str, Range | None], trainer: str = "") -> AbsentStrategy | None:
    """Why a stack has no such strategy; ``None`` where it has, or where that is not certain.

    Args:
        name: of the strategy, without a variant.
        versions: of the stack, by package; what is not there may be any.
        trainer: the one that is asked about; empty: only what every trainer lacks counts.
    """
    for absence in _absences(name, trainer):
        found = {package: versions.get(package) for package in absence.when}
        if all(here is not None and parse(absence.when[package]).covers(here) for package, here in found.items()):
            return absence
    return None


def partly_absent_strategies(
    name: str, versions: Mapping[str, Range | None], trainer: str = ""
) -> tuple[AbsentStrategy, ...]:
    """Why a stack whose versions are not settled has no such strategy with some of them; empty where it has with all.

    Args:
        name: of the strategy, without a variant.
        versions: of the stack, by package; what is not there may be any, ``None``: it is not installed.
        trainer: the one that is asked about; empty: only what every trainer lacks counts.
    """
    return tuple(
        absence
        for absence in _absences(name, trainer)
        if all(
            (here := versions.get(package, ALL)) is not None and here.meets(parse(text))
            for package, text in absence.when.items()
        )
    )


def _absences(name: str, trainer: str) -> Iterator[AbsentStrategy]:
    for absence in STRATEGIES:
        if absence.strategy == name and (not absence.except_for or (trainer and trainer not in absence.except_for)):
            yield absence
