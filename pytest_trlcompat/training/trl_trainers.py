"""Which trainers each release of TRL has, and what it calls them.

``trl_trainers.json`` is read from the sources in the wheels of all releases, by
``python -m pytest_trlcompat.matrix.covering.trainers_of_wheels``; ``tests/stack/test_axes.py`` compares it with the
release that is installed. Imports the standard library alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["FILE", "Span", "key_of", "last_release", "spans_of", "where"]

FILE = Path(__file__).with_suffix(".json")


class Span(NamedTuple):
    """Releases that have a class, one after the other.

    Attributes:
        name: of the class.
        package: of TRL, in which it is: ``trl.trainer`` or ``trl.experimental``.
        since: the first of these releases.
        until: the last one; empty where the newest release that was read still has it.
        left: the first release after them; empty likewise.
    """

    name: str
    package: str
    since: str
    until: str
    left: str


@functools.cache
def _document() -> tuple[tuple[str, ...], Mapping[str, tuple[Span, ...]]]:
    document = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(document["releases"]), {
        trainer: tuple(Span(*span) for span in spans) for trainer, spans in document["trainers"].items()
    }


def spans_of(trainer: str) -> tuple[Span, ...]:
    """Where one of :data:`~pytest_trlcompat.training.axes.TRAINERS` is, the oldest first; empty for ``trainer``."""
    return _document()[1].get(trainer, ())


def last_release() -> str:
    """The newest release that was read; of later ones nothing is known."""
    return _document()[0][-1]


def where(trainer: str) -> str:
    """``trl 0.9.6 to 1.12.0``; ``trl 1.9.0 and later`` where the newest release has it."""
    merged: list[list[str]] = []
    for span in spans_of(trainer):
        left = merged[-1][2] if merged else ""
        if not merged or (left and key_of(left) < key_of(span.since)):
            merged.append([span.since, span.until, span.left])
        elif left and not (span.left and key_of(span.left) <= key_of(left)):  # moved, renamed, or both for a while
            merged[-1][1:] = [span.until, span.left]
    texts = [
        f"{since} and later" if not until else since if since == until else f"{since} to {until}"
        for since, until, _ in merged
    ]
    return f"trl {', '.join(texts)}" if texts else ""


def key_of(release: str) -> tuple[int, ...]:
    """By which releases are sorted."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])
