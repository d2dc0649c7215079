"""The assertion, in the test process: launches the trainings, and says what differs first."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.equivalence.comparing import Divergence, compare
from pytest_trlcompat.equivalence.recording import record
from pytest_trlcompat.launch.payload import dump
from pytest_trlcompat.launch.result import LaunchError

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher

__all__ = ["NotEquivalent", "NothingCompared", "assert_equivalent"]

_SEEDS = (1, 2, 3)
"""Seeds of the changes of weights that measure the tolerance."""


class NothingCompared(AssertionError):
    """No other training can be compared with the one in one process: the message says why."""


class NotEquivalent(AssertionError):
    """A training under a strategy differs from the same training in one process.

    Attributes:
        divergences: by strategy, for those that differ.
        failures: by strategy, for those whose training failed.
    """

    def __init__(
        self, message: str, divergences: Mapping[str, Divergence], failures: Mapping[str, LaunchError] | None = None
    ) -> None:
        super().__init__(message)
        self.divergences = dict(divergences)
        self.failures = dict(failures or {})


def assert_equivalent(
    launcher: Launcher,
    train: Callable[..., Any],
    /,
    *args: Any,
    strategies: Sequence[str] = (),
    world_size: int = 2,
    tolerance: float | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **more: Any,
) -> None:
    """Train under each strategy and in one process, and compare rows, losses, gradient norms and weights.

    One process accumulates gradients over ``world_size`` times as many batches, so that each step trains on the same
    rows. Each step is logged.

    Args:
        train: trains a ``transformers.Trainer``, any number of times; called as ``train(*args, **kwargs)``.
        strategies: names of strategies, at least one.
        world_size: number of ranks under each.
        tolerance: how far numbers may be off, relative to the largest of each quantity. By default it is measured:
            three more trainings in one process, from weights changed by one unit in their last place, show the effect
            of rounding.
        options: options of strategies, by their names.
        kwargs: keyword arguments of ``train`` whose names are those of arguments here; ``more``: its others.

    Raises:
        NotEquivalent: for each strategy that differs, it names the first difference and what explains it; it also
            names those whose training failed.
        NothingCompared: in one process no step was made, no weight changed, or numbers are not finite.
        LaunchError: the training in one process failed; or it failed under a strategy, and no other strategy differs.
            It is raised after every strategy was tried.
        ValueError: no strategy is named, ``options`` name another one, or the tolerance is negative or not finite.
        StrategyAbsent: the stack does not have one of the strategies.
    """
    __tracebackhide__ = True
    names = _checked(strategies, options or {}, tolerance)
    payload = dump(train, args, {**(kwargs or {}), **more})
    name = getattr(train, "__qualname__", repr(train))
    with tempfile.TemporaryDirectory(prefix="trlcompat-") as folder:
        runs = _Runs(launcher, payload, Path(folder), world_size)
        alone, shortfalls = runs.alone("alone", None)
        if shortfalls:
            raise NothingCompared(f"nothing can be told of {name}: in one process {'; '.join(shortfalls)}")
        divergences: dict[str, Divergence] = {}
        failures: dict[str, LaunchError] = {}
        for strategy in names:
            try:
                path = runs.under(strategy, (options or {}).get(strategy))
            except LaunchError as error:
                failures[strategy] = error
                continue
            # First with the smallest tolerance: the trainings that measure it are needed only where something differs.
            divergence = runs.compare(alone, path, [], tolerance)
            if divergence.differences and tolerance is None:
                divergence = runs.compare(alone, path, runs.changed(), None)
            if divergence.differences:
                divergences[strategy] = divergence
    if divergences:
        texts = [_text(name, strategy, world_size, divergence) for strategy, divergence in divergences.items()]
        texts += [f"{name} under {strategy} failed: {error}" for strategy, error in failures.items()]
        raise NotEquivalent("\n".join(texts), divergences, failures)
    if len(failures) == 1 == len(names):
        raise next(iter(failures.values()))
    if failures:
        texts = [f"{name} under {strategy} failed: {error}" for strategy, error in failures.items()]
        if same := [strategy for strategy in names if strategy not in failures]:
            texts.append(f"{name} under {', '.join(same)} is the training that it is in one process")
        first = next(iter(failures.values()))
        raise LaunchError("\n".join(texts), first.result) from first


def _checked(
    strategies: Sequence[str], options: Mapping[str, Mapping[str, Any]], tolerance: float | None
) -> tuple[str, ...]:
    """The strategies, each once."""
    names = () if isinstance(strategies, str) else tuple(dict.fromkeys(strategies))
    if not names:
        raise ValueError(
            f"assert_equivalent compares with nothing by strategies={strategies!r}: name at least one in a list, such "
            'as strategies=["ddp", "zero3"]'
        )
    if unused := sorted(set(options) - set(names)):
        raise ValueError(f"options name {', '.join(unused)}, and strategies are {', '.join(names)}: name it in both")
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance={tolerance!r} tells nothing apart: it takes a finite number from 0 on, or None")
    return names


class _Runs:
    """The trainings of one assertion, each saved into a file."""

    def __init__(self, launcher: Launcher, payload: bytes, folder: Path, world_size: int) -> None:
        self._launcher, self._payload, self._folder, self._world_size = launcher, payload, folder, world_size
        self._changed: list[str] = []

    def alone(self, label: str, seed: int | None) -> tuple[str, list[str]]:
        path = str(self._folder / label)
        result = self._launcher(record, self._payload, path, self._world_size, kwargs={"seed": seed}, strategy="single")
        return path, list(result.values[0])

    def under(self, strategy: str, options: Mapping[str, Any] | None) -> str:
        path = str(self._folder / strategy)
        self._launcher(record, self._payload, path, strategy=strategy, world_size=self._world_size, options=options)
        return path

    def changed(self) -> list[str]:
        """The trainings from weights changed in their last place; they run when they are first needed."""
        self._changed = self._changed or [self.alone(f"changed{seed}", seed)[0] for seed in _SEEDS]
        return self._changed

    def compare(self, alone: str, other: str, changed: Sequence[str], tolerance: float | None) -> Divergence:
        result = self._launcher(compare, alone, other, changed, tolerance, strategy="single")
        divergence: Divergence = result.values[0]
        return divergence


def _text(name: str, strategy: str, world_size: int, divergence: Divergence) -> str:
    first, *others = divergence.differences
    lines = [
        f"{name} under {strategy} with {world_size} rank(s) is not the training that it is in one process; the first "
        f"difference: {first.describe()}, off by {first.off:.3g} where {first.allowed:.3g} is allowed"
    ]
    if others:
        stages = list(dict.fromkeys(f"{difference.stage} ({difference.where})" for difference in others))
        more = f" and {len(stages) - 4} more" if len(stages) > 4 else ""
        lines.append(f"  also: {', '.join(stages[:4])}{more}")
    if divergence.reason:
        lines.append(f"  reason: {divergence.reason}")
    return "\n".join(lines)
