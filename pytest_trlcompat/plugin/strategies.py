"""Tests under several strategies: the fixture ``strategy_launcher``, and the marker ``strategies`` that names them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.strategies import NAMES, StrategyAbsent

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher, LaunchResult

__all__ = [
    "FIXTURE",
    "LINE",
    "StrategiesError",
    "StrategyLauncher",
    "check_mark",
    "pytest_generate_tests",
    "skip_reason",
]

LINE = (
    "strategies('ddp', 'zero3', ...): the test, which uses the fixture strategy_launcher, runs under each; "
    "it is skipped under one that the installed stack does not have"
)
"""The marker's registration, shown by ``pytest --markers``."""
FIXTURE = "strategy_launcher"


class StrategiesError(ValueError):
    """An invalid ``strategies`` marker."""


def check_mark(mark: pytest.Mark) -> tuple[str, ...]:
    """The names in a ``strategies`` marker.

    Raises:
        StrategiesError: there is none, one is unknown or stands there twice, or there are keyword arguments.
    """
    if mark.kwargs or not mark.args:
        raise StrategiesError(f"name strategies, like strategies('ddp', 'zero3'); known are {', '.join(NAMES)}")
    if unknown := [name for name in mark.args if name not in NAMES]:
        raise StrategiesError(f"unknown strategy {unknown[0]!r}; known are {', '.join(NAMES)}")
    if len(set(mark.args)) < len(mark.args):
        raise StrategiesError(f"a strategy stands there twice: {', '.join(mark.args)}")
    return mark.args


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each strategy of the closest marker; without one, for each that there is."""
    if FIXTURE not in metafunc.fixturenames or not _is_ours(metafunc.definition):
        return
    mark = next(metafunc.definition.iter_markers("strategies"), None)
    try:
        names = NAMES if mark is None else check_mark(mark)
    except StrategiesError as error:
        pytest.fail(f"{metafunc.definition.nodeid}: marker strategies: {error}", pytrace=False)
    metafunc.parametrize(FIXTURE, names, indirect=True)


def _is_ours(item: pytest.Item) -> bool:
    """Whether the fixture is this plugin's, or a project's that builds on it: another one may have the same name."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {}).get(FIXTURE, ())
    for definition in reversed(definitions):  # the one that is used is the last
        if definition.func.__module__ == f"{__package__}.fixtures":
            return True
        if FIXTURE not in definition.argnames:
            return False
    return False


def skip_reason(name: str) -> str | None:
    """Why a test under this strategy is skipped here; ``None`` if it runs."""
    from pytest_trlcompat.launch.strategy import check_present, strategy

    try:
        check_present(strategy(name), stack.installed())
    except StrategyAbsent as absent:
        return str(absent)
    return None


class StrategyLauncher:
    """Runs functions under one strategy; takes what a launcher takes, but for ``strategy``.

    Attributes:
        strategy: its name.
    """

    def __init__(self, launcher: Launcher, strategy: str) -> None:
        self.strategy = strategy
        self._launcher = launcher

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> LaunchResult:
        __tracebackhide__ = True
        return self._launcher(function, *args, strategy=self.strategy, **kwargs)

    def command(self, words: Sequence[str | os.PathLike[str]], /, **kwargs: Any) -> LaunchResult:
        """Run a command; takes what a launcher's ``command`` takes, but for ``strategy``."""
        __tracebackhide__ = True
        return self._launcher.command(words, strategy=self.strategy, **kwargs)
