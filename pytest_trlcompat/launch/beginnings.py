"""The trainings that begin in a process, and the known issues that bite them: seen from outside, not logged.

A test may build any trainer; Transformers' own call of callbacks is where all of them pass. The main process of a
launch alone is asked.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pytest_trlcompat.training import begin

__all__ = ["NAME", "Beginnings", "is_of_a_training"]

NAME = "known_issue_of_a_training"
"""Of a record, the key that tells it from what was logged."""
_MODULE, _CLASS, _METHOD = "transformers.trainer_callback", "CallbackHandler", "on_train_begin"


class Beginnings:
    """Collects what bites the trainings that begin while it is at work.

    Attributes:
        issues: by their ids, each with one line for people.
    """

    def __init__(self) -> None:
        self.issues: dict[str, str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at each training that begins, where Transformers was imported before."""
        handler = getattr(sys.modules.get(_MODULE), _CLASS, None)
        begins: Callable[..., Any] | None = getattr(handler, _METHOD, None)
        if begins is None:
            yield
            return
        setattr(handler, _METHOD, self._observed(begins))
        try:
            yield
        finally:
            setattr(handler, _METHOD, begins)

    def _observed(self, begins: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(begins)
        def observed(*args: Any, **kwargs: Any) -> Any:
            # The handler does not know its trainer, whose method calls it.
            trainer = sys._getframe(1).f_locals.get("self")
            if hasattr(trainer, "is_world_process_zero"):
                for issue in begin.biting(trainer):
                    self.issues.setdefault(issue.id, issue.text)
            return begins(*args, **kwargs)

        return observed

    def records(self) -> list[dict[str, Any]]:
        """As what a rank logged, for the test process, which shows them at its end."""
        return [
            {NAME: issue, "name": begin.LOGGER, "msg": text, "created": time.time()}
            for issue, text in self.issues.items()
        ]


def is_of_a_training(record: Mapping[str, Any]) -> bool:
    """Whether a record of a rank is one of :meth:`Beginnings.records`, and was not logged."""
    return NAME in record
