"""Launches that several suites judge: each is made once per session. Runs in the test process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.launch import LaunchError

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher, LaunchResult

__all__ = ["LaunchCache"]


class LaunchCache:
    """A launcher that makes the same launch once; one that failed fails again, with the same error, for later callers.

    Launches are the same where body, arguments and settings are, by their ``repr``.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._known: dict[str, LaunchResult | LaunchError] = {}

    def __call__(self, body: Callable[..., Any], /, *args: Any, **settings: Any) -> LaunchResult:
        """As the launcher's own call; see :class:`pytest_trlcompat.launch.Launcher`."""
        key = repr((body.__module__, body.__qualname__, args, sorted(settings.items())))
        if key not in self._known:
            try:
                self._known[key] = self._launcher(body, *args, **settings)
            except LaunchError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, LaunchError):
            raise found
        return found
