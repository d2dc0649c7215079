"""What was due and what was met: code that calls something right first lists what that takes.

Comparing, proving, sweeping, watching and publishing all end in "nothing is wrong". An :class:`Account` prevents that
from being said where nothing was looked at: it has a list of what is due, and is complete only if the list has entries
and every one of them was met. Ranks use it too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

__all__ = ["Account"]

Name = TypeVar("Name", bound=Hashable)

_SHOWN = 4
"""How many names a sentence shows; further ones are only counted."""


class Account(Generic[Name]):
    """A list of what is due, and what was met of it.

    Args:
        noun: what is listed, in the plural, for sentences: ``quantities``, ``ranks``, ``packages``.
        due: what is due, each once, in the order in which sentences name it.

    >>> account = Account("ranks", [0, 1])
    >>> account.meet(0)
    >>> account.shortfall()
    'of 2 ranks 1 is missing: 1'
    """

    def __init__(self, noun: str, due: Iterable[Name]) -> None:
        self.noun = noun
        self._due: dict[Name, bool] = dict.fromkeys(due, False)
        self._refused: dict[Name, str] = {}
        self._unexpected: dict[Name, None] = {}

    @property
    def due(self) -> tuple[Name, ...]:
        return tuple(self._due)

    @property
    def missing(self) -> tuple[Name, ...]:
        """What is due and was neither met nor refused."""
        return tuple(name for name, met in self._due.items() if not met and name not in self._refused)

    @property
    def refused(self) -> dict[Name, str]:
        """Names of what is there and does not count, with the reason."""
        return dict(self._refused)

    @property
    def unexpected(self) -> tuple[Name, ...]:
        """Names of what is there and was not due: the two sides do not mean the same things."""
        return tuple(self._unexpected)

    @property
    def is_complete(self) -> bool:
        """Whether something was due, all of it was met, and nothing else was there."""
        return bool(self._due) and not self.missing and not self._refused and not self._unexpected

    def meet(self, name: Name) -> None:
        """Count ``name`` as met; something that was not due makes the account incomplete."""
        if name in self._due:
            self._due[name] = True
        else:
            self._unexpected[name] = None

    def meet_all(self, names: Iterable[Name]) -> None:
        for name in names:
            self.meet(name)

    def refuse(self, name: Name, reason: str) -> None:
        """Say that what is there under this name does not count, even if it was met before, or was not due.

        Args:
            reason: as it follows the name: ``is not finite``.
        """
        self._refused.setdefault(name, reason)

    def shortfall(self) -> str:
        """What keeps the account from being complete, in one sentence; empty where it is complete."""
        if not self._due and not self._refused and not self._unexpected:
            return f"no {self.noun} were due, so that nothing was shown"
        parts = []
        if missing := self.missing:
            verb = "is" if len(missing) == 1 else "are"
            parts.append(f"of {len(self._due)} {self.noun} {len(missing)} {verb} missing: {_listed(missing)}")
        if self._refused:
            parts.append(_listed([f"{name} {reason}" for name, reason in self._refused.items()]))
        if self._unexpected:
            verb = "was" if len(self._unexpected) == 1 else "were"
            parts.append(f"{_listed(self._unexpected)} {verb} not due")
        return "; ".join(parts)


def _listed(names: Iterable[object]) -> str:
    texts = [" ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in names]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
