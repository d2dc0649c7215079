"""Examining one candidate: versions, environment, predicate. A job: in goes a candidate, out comes an observation.

Imports only the standard library and this room.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat.bisect.candidates.base import Candidate, Prepared, Source
from pytest_trlcompat.bisect.journal import Journal
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.predicate import Predicate
from pytest_trlcompat.matrix.errors import Unreachable, Untestable

__all__ = ["Examined", "examine"]


@dataclass(frozen=True)
class Examined:
    """What became of a candidate.

    Attributes:
        reused: the label of the candidate whose observation this is; ``None`` when it was run now.
    """

    identity: str
    observation: Observation
    reused: str | None = None


def examine(
    source: Source, candidate: Candidate, predicate: Predicate, journal: Journal, *, again: bool = False
) -> Examined:
    """Observe a candidate, or take the observation of another one that has the same versions.

    Args:
        again: run it though it was observed.

    Raises:
        Unreachable: when the registry cannot be reached, so that nothing can be said of the candidate itself.
        BisectError: when the question makes no sense.
    """
    started = time.monotonic()
    try:
        prepared = source.prepare(candidate)
    except Unreachable:
        raise
    except Untestable as error:
        seconds = time.monotonic() - started
        return Examined(f"unresolved {candidate.key}", Observation(reason=_untestable(error), build_seconds=seconds))
    if prepared.lock is not None:
        journal.keep_lock(prepared.identity, prepared.lock)
    known = journal.observations(prepared.identity)
    if known and not again:
        first = journal.first(prepared.identity)
        assert first is not None
        return Examined(prepared.identity, known[-1], first.label)
    return Examined(prepared.identity, _run(prepared, predicate, journal.folder, started))


def _run(prepared: Prepared, predicate: Predicate, folder: Path, started: float) -> Observation:
    said: list[str] = []
    built = started
    try:
        with prepared.place(said.append) as place:
            built = time.monotonic()
            (folder / "work").mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(dir=folder / "work", prefix="run-"))
            try:
                observation = predicate.observe(place, work)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            ended = time.monotonic()
    except Unreachable:
        raise
    except Untestable as error:
        return Observation(reason=_untestable(error), build_seconds=time.monotonic() - started)
    return dataclasses.replace(observation, seconds=ended - built, build_seconds=built - started, reused=not said)


def _untestable(error: Untestable) -> str:
    return f"untestable: {error}"
