"""Which strategies a question is about, and the sentence that begins an answer: for pytest's header and the doctor.

Imports no package of the stack and little else, because pytest imports it when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pytest_trlcompat.catalog import existence
from pytest_trlcompat.catalog.existence import AbsentStrategy
from pytest_trlcompat.catalog.issue import STRATEGIES, kind
from pytest_trlcompat.catalog.ranges import Range
from pytest_trlcompat.doctor.stack_spec import StackSpec
from pytest_trlcompat.strategies import families

__all__ = [
    "StrategyError",
    "absent_strategy",
    "considered_strategies",
    "partly_absent",
    "partly_absent_strategies",
    "summary",
]

_NEEDED_BY_STRATEGY = {name: package for family in families() for package in family.packages for name in family.names}


class StrategyError(ValueError):
    """A requested strategy is unknown, or cannot run on the stack."""


def considered_strategies(names: Sequence[str], spec: StackSpec, trainer: str = "") -> tuple[tuple[str, ...], str]:
    """The strategies to consider, and a text that names those left out because the stack does not have them.

    Args:
        trainer: the one that is asked about; empty for all.

    Raises:
        StrategyError: for an unknown strategy, or one that cannot run on this stack.
    """
    absent = set(spec.absent)
    impossible = {name: package for name, package in _NEEDED_BY_STRATEGY.items() if package in absent}
    for name in names:
        if kind(name) not in STRATEGIES:
            raise StrategyError(f"unknown strategy {name!r}; known are {', '.join(STRATEGIES)}")
        if kind(name) in impossible:
            raise StrategyError(f"strategy {name} needs {impossible[kind(name)]}, which is not in {spec.source}")
        if (absence := absent_strategy(kind(name), spec.versions, trainer)) is not None:
            raise StrategyError(
                f"strategy {name} is absent with {_named(absence.when, spec)} ({spec.source}): {absence.why}; take "
                f"{absence.instead}, or ask about another strategy"
            )
    if names:
        return tuple(dict.fromkeys(names)), ""
    left_out = [f"{', '.join(impossible)}: deepspeed is not installed"] if impossible else []
    absences = {name: absent_strategy(name, spec.versions, trainer) for name in STRATEGIES}
    left_out += [f"{name}: {absence.why}" for name, absence in absences.items() if absence is not None]
    possible = tuple(name for name in STRATEGIES if name not in impossible and absences[name] is None)
    return possible, "; ".join(left_out)


def absent_strategy(name: str, versions: Mapping[str, Range | None], trainer: str = "") -> AbsentStrategy | None:
    """Why a stack does not have a strategy; ``None`` if it has, or if that is not certain.

    Args:
        name: of the strategy, without a variant.
        versions: of the stack, by package; a package that is not among them may have any version.
        trainer: the one that is asked about; empty: only strategies that every trainer lacks count.
    """
    absences = (
        absence for absence in existence.STRATEGIES if absence.concerns(name, trainer) and absence.is_certain(versions)
    )
    return next(absences, None)


def partly_absent_strategies(
    name: str, versions: Mapping[str, Range | None], trainer: str = ""
) -> tuple[AbsentStrategy, ...]:
    """Why a stack whose versions are not settled has no such strategy with some of them; empty where it has with all.

    Args:
        name: of the strategy, without a variant.
        versions: of the stack, by package; a package that is not among them may have any version, one with ``None`` is
            not installed.
        trainer: the one that is asked about; empty: only strategies that every trainer lacks count.
    """
    return tuple(
        absence for absence in existence.STRATEGIES if absence.concerns(name, trainer) and absence.is_possible(versions)
    )


def partly_absent(names: Sequence[str], spec: StackSpec, trainer: str = "") -> tuple[str, ...]:
    """A sentence for each of the strategies that the stack does not have with some of the versions that it may have."""
    return tuple(
        f"{name} is absent with {_ranges(absence.when)}: {absence.why}; nothing is said about these versions"
        for name in dict.fromkeys(map(kind, names))
        for absence in partly_absent_strategies(name, spec.versions, trainer)
    )


def _ranges(when: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {text}" for package, text in when.items())


def _named(packages: Iterable[str], spec: StackSpec) -> str:
    return ", ".join(f"{package} {spec.texts.get(package, '')}".strip() for package in packages)


def summary(number: int, unjudged: int = 0, names: str = "", *, measured: bool = True) -> str:
    """``2 known issues affect this stack: a, b; 3 more cannot be judged``.

    Args:
        measured: whether cells have the stack's releases; otherwise, that none affects it is only a prediction.
    """
    if number == 0:
        if measured and not unjudged:
            return "no known issue affects this stack"
        text = "no known issue is predicted to affect this stack"
        return f"{text}, but {unjudged} cannot be judged" if unjudged else text
    text = "1 known issue affects this stack" if number == 1 else f"{number} known issues affect this stack"
    text += f": {names}" if names else ""
    return f"{text}; {unjudged} more cannot be judged" if unjudged else text
