"""What is said when a training begins: the known issues that bite it and are not cured, in a line each.

Callbacks, cured trainers and the plugin ask here. The answer is the doctor's, which is above: it is imported by its
name where a training begins, as the program imports its commands, so that none of them needs the harness to train.
Imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import weakref
from dataclasses import dataclass
from typing import Any

__all__ = ["LOGGER", "BitingIssue", "biting", "prepare", "tell"]

LOGGER = "pytest_trlcompat.known_issues"
_ANSWERING = "pytest_trlcompat.doctor.train_begin"

_told: weakref.WeakSet[Any] = weakref.WeakSet()
"""The trainers of which something was said: a callback, a cure and a second ``train()`` say it once."""


@dataclass(frozen=True)
class BitingIssue:
    """A known issue that bites a training and is not cured there.

    Attributes:
        text: one line for people.
    """

    id: str
    severity: str
    text: str


def prepare(trainer: Any) -> None:
    """Read what :func:`biting` needs of the stack, when a trainer is built: its training then begins without delay.

    Like that, on the main process alone, and never raises.
    """
    with contextlib.suppress(Exception):
        if trainer.is_world_process_zero():
            importlib.import_module(_ANSWERING).prepare(trainer)


def biting(trainer: Any) -> tuple[BitingIssue, ...]:
    """The known issues that certainly bite the training of a trainer that is built, the worst first.

    Asks no other rank, and reads settings alone. On other processes than the main one it is empty. It never raises:
    what cannot be told must not end a training.
    """
    try:
        if not trainer.is_world_process_zero():
            return ()
        answer = importlib.import_module(_ANSWERING).biting(trainer)
        return tuple(BitingIssue(*fields) for fields in answer)
    except Exception as error:
        logging.getLogger(LOGGER).debug("known issues of this training: not known, %s: %s", type(error).__name__, error)
        return ()


def tell(trainer: Any) -> tuple[BitingIssue, ...]:
    """Log a warning for each of :func:`biting`, once for each trainer."""
    if trainer in _told:
        return ()
    issues = biting(trainer)
    _told.add(trainer)
    for issue in issues:
        logging.getLogger(LOGGER).warning("%s", issue.text, extra={"known_issue": issue.id})
    return issues
