"""The assertion, in the test process: launches the trainings, and says what differs first.

Must not import the stack.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.equivalence.comparing import Divergence, compare
from pytest_trlcompat.equivalence.recording import record
from pytest_trlcompat.launch.payload import dump

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher

__all__ = ["NotEquivalent", "assert_equivalent"]

_SEEDS = (1, 2, 3)
"""Of the changes by which the tolerance is measured."""


class NotEquivalent(AssertionError):
    """A training under a strategy is not the one that it is in one process.

    Attributes:
        divergences: by strategy, of those that differ.
    """

    def __init__(self, message: str, divergences: Mapping[str, Divergence]) -> None:
        super().__init__(message)
        self.divergences = dict(divergences)


def assert_equivalent(
    launcher: Launcher,
    train: Callable[..., Any],
    /,
    *args: Any,
    strategies: Sequence[str],
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
        strategies: names of strategies.
        world_size: number of ranks under each.
        tolerance: how far numbers may be off, relative to the largest of each quantity; by default it is measured:
            three more trainings in one process, from weights changed by one unit in their last place, say what rounding
            leaves.
        options: of strategies, by their names.
        kwargs: keyword arguments of ``train`` that have a name from this list; ``more``: its others.

    Raises:
        NotEquivalent: names, for each strategy that differs, the first difference, and what explains it.
        LaunchError: a training failed.
        StrategyAbsent: the stack does not have one of the strategies.
    """
    __tracebackhide__ = True
    payload = dump(train, args, {**(kwargs or {}), **more})
    name = getattr(train, "__qualname__", repr(train))
    with tempfile.TemporaryDirectory(prefix="trlcompat-") as folder:
        runs = _Runs(launcher, payload, Path(folder), world_size)
        alone = runs.alone("alone", None)
        found = {}
        for strategy in strategies:
            path = runs.under(strategy, (options or {}).get(strategy))
            divergence = runs.compare(alone, path, [], tolerance)
            if divergence.differences and tolerance is None:
                divergence = runs.compare(alone, path, runs.changed(), None)
            if divergence.differences:
                found[strategy] = divergence
    if found:
        texts = (_text(name, strategy, world_size, each) for strategy, each in found.items())
        raise NotEquivalent("\n".join(texts), found)


class _Runs:
    """The trainings of one assertion, each saved into a file."""

    def __init__(self, launcher: Launcher, payload: bytes, folder: Path, world_size: int) -> None:
        self._launcher, self._payload, self._folder, self._world_size = launcher, payload, folder, world_size
        self._changed: list[str] = []

    def alone(self, label: str, seed: int | None) -> str:
        path = str(self._folder / label)
        self._launcher(record, self._payload, path, self._world_size, kwargs={"seed": seed}, strategy="single")
        return path

    def under(self, strategy: str, options: Mapping[str, Any] | None) -> str:
        path = str(self._folder / strategy)
        self._launcher(record, self._payload, path, strategy=strategy, world_size=self._world_size, options=options)
        return path

    def changed(self) -> list[str]:
        """Of weights changed in their last place; trained where they are first needed."""
        self._changed = self._changed or [self.alone(f"changed{seed}", seed) for seed in _SEEDS]
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
        stages = list(dict.fromkeys(f"{each.stage} ({each.where})" for each in others))
        more = f" and {len(stages) - 4} more" if len(stages) > 4 else ""
        lines.append(f"  also: {', '.join(stages[:4])}{more}")
    if divergence.reason:
        lines.append(f"  reason: {divergence.reason}")
    return "\n".join(lines)
