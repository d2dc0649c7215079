"""Launches that several suites judge, each made once per session, and what their ranks failed with.

Runs in the test process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.launch import LaunchError
from pytest_trlcompat.launch.result import is_of_ended_peer

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher, LaunchResult

__all__ = ["Failures", "LaunchCache", "distinct"]


def distinct(texts: Iterable[str | None]) -> list[str]:
    """What ranks failed with, each text once; that another rank had ended only where nothing else was said."""
    found = dict.fromkeys(text for text in texts if text)
    return [text for text in found if not is_of_ended_peer(text)] or list(found)


@dataclass(frozen=True)
class Failures:
    """What the ranks of a launch failed with, stage by stage: every rank's, since another issue must explain each.

    Attributes:
        first: by stage, what the first rank that failed said.
        others: by stage, what other ranks said beside it.
    """

    first: Mapping[str, str]
    others: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, str | None]]) -> Failures:
        """
        Args:
            ranks: of each rank the stages that failed, and why; ``None`` for one that did not.
        """
        stages = dict.fromkeys(stage for rank in ranks for stage in rank)
        said = {stage: distinct(rank.get(stage) for rank in ranks) for stage in stages}
        return cls(
            {stage: texts[0] for stage, texts in said.items() if texts},
            {stage: texts[1:] for stage, texts in said.items() if texts[1:]},
        )

    @property
    def of_other_ranks(self) -> dict[str, Mapping[str, Sequence[str]]]:
        """:attr:`others` as evidence; empty where nothing else was raised."""
        return {"failures_of_other_ranks": self.others} if self.others else {}


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
