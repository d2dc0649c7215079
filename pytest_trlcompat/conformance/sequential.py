"""Ranks that train several times in one launch begin the next training together, or not at all. Runs inside the ranks.

A rank that goes on after an exception may leave others waiting in a collective that it never joins. Its next
collective would meet them there, and they would exchange numbers of different trainings. So before a rank goes on, it
writes how the training ended for it into a store that no process group uses, and reads how it ended for the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_trlcompat.accelerator import artefacts
from pytest_trlcompat.conformance import refusals
from pytest_trlcompat.launch.result import is_of_ended_peer

__all__ = ["BEGINS", "ENDS", "FAILED_ON", "PATIENCE", "RankDesynchronised", "in_turn", "training"]

PATIENCE = 10.0
"""Seconds that a rank whose training has ended waits for the others, once one has failed. Ranks that only come later to
the same place need less; verdicts do not depend on it."""
BEGINS, ENDS = "trlcompat begins ", "trlcompat ends"
"""What a rank prints to stderr before each training, followed by its name, and after the last one: so it is known which
training hangs."""
FAILED_ON = "failed_on_ranks"
"""Key of the result of a training that ranks ended differently: the ranks that failed by themselves."""
_POLL = 0.01


class RankDesynchronised(RuntimeError):
    """A training ended in an exception on this rank while others still wait for it: the launch must end.

    Attributes:
        name: of the training.
        results: of all trainings until now, including this one.
    """

    def __init__(self, name: str, results: dict[str, dict[str, Any]]) -> None:
        super().__init__(name, results)
        self.name, self.results = name, results

    def __str__(self) -> str:
        result = self.results[self.name]
        where = ", ".join(map(str, result[FAILED_ON]))
        return f"{self.name!r} ended on rank {where} alone: {result.get('failure')}"


@dataclass
class _Ended:
    """How a training ended on one rank.

    Attributes:
        text: of the exception; ``None`` without one, and where the only error was that another rank had left.
        place: its class and every line of its traceback; empty where all went well.
        meant: whether it was raised on purpose, and is no crash; ``phase``: when; see :mod:`.refusals`.
    """

    text: str | None = None
    place: str = ""
    meant: bool = False
    phase: str = ""


@dataclass
class _Ranks:
    """
    Attributes:
        number: how many trainings have begun.
        failed: the ranks that failed by themselves in the last training, where not all failed at the same place.
        parted: whether this rank's next collective would meet one of another training.
        awaited: whether others have not ended the last training.
        disturbed: whether a collective failed: what ranks had begun to send could arrive in the next training.
    """

    rank: int
    size: int
    store: Any
    number: int = 0
    failed: list[int] = field(default_factory=list)
    parted: bool = False
    awaited: bool = False
    disturbed: bool = False

    def begin(self) -> None:
        assert not self.parted, "ranks that are out of step cannot train"
        assert not self.disturbed, "what a collective that failed has sent would reach this training"
        self.number += 1
        self.store.set(self._key("begun", self.rank), "")

    def has_left(self) -> bool:
        """Whether a rank has left the others behind."""
        return any(self.store.check([self._key("left", rank)]) for rank in range(self.size))

    def end(self, own_ending: _Ended) -> _Ended:
        """Tell the other ranks how the training ended here, and read how it ended for them.

        Returns:
            How it ended on this rank, where it did so at the same place on all; else on the first rank that failed by
            itself.
        """
        self.store.set(self._key("ended", self.rank), json.dumps(vars(own_ending)))
        known = self._heard()
        self.awaited = len(known) < self.size
        self.parted = self.awaited or len({ending.place for ending in known.values()}) > 1
        if not self.parted:
            return own_ending
        failures = {rank: ending for rank, ending in known.items() if ending.text is not None}
        by_themselves = {
            rank: ending for rank, ending in failures.items() if not is_of_ended_peer(str(ending.text))
        } or failures
        self.failed = sorted(by_themselves)
        if self.awaited:
            self.store.set(self._key("left", self.rank), "")
        return next(
            (by_themselves[rank] for rank in self.failed), _Ended("RuntimeError: another rank left this training")
        )

    def _heard(self) -> dict[int, _Ended]:
        """How it ended on each rank; after :data:`PATIENCE`, on those ranks that have written it."""
        deadline: float | None = None
        while True:
            known = {rank: self._read(rank) for rank in range(self.size) if self._has("ended", rank)}
            if len(known) == self.size:
                return known
            if any(ending.place for ending in known.values()):
                # Not before all have begun: rank 0 compares the last training while the others begin this one.
                if deadline is None and all(self._has("begun", rank) for rank in range(self.size)):
                    deadline = time.monotonic() + PATIENCE
                if deadline is not None and time.monotonic() > deadline:
                    return known
            time.sleep(_POLL)

    def _has(self, event: str, rank: int) -> bool:
        return bool(self.store.check([self._key(event, rank)]))

    def _read(self, rank: int) -> _Ended:
        return _Ended(**json.loads(self.store.get(self._key("ended", rank))))

    def _key(self, event: str, rank: int) -> str:
        return f"trlcompat/training-{self.number}/{event}/{rank}"


_met: list[_Ranks] = []
"""The ranks of the launch, once they are known. Kept for the process, since a rank is a process of one launch."""


def _ranks() -> _Ranks | None:
    """``None`` where there is only one rank."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return None
    if not _met:
        import torch

        store, _, _ = next(torch.distributed.rendezvous("env://"))
        _met.append(_Ranks(int(os.environ["RANK"]), size, store))
    return _met[0]


@contextlib.contextmanager
def training() -> Iterator[dict[str, Any]]:
    """Catch what a training raises, and put it into the dictionary: its ``text``, and ``meant`` and ``phase`` as
    :mod:`.refusals` says. Then wait for the other ranks.

    Where ranks ended differently, all of them get the text of the rank that failed; :func:`in_turn` then ends.
    """
    ranks, ended, result = _ranks(), _Ended(), dict[str, Any]()
    if ranks is not None:
        ranks.begin()
    try:
        yield result
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        if ranks is not None and ranks.has_left():
            # The error is only that a rank which left no longer answers; that rank tells why.
            ended = _Ended(None, "freed")
        else:
            if ranks is not None:
                ranks.disturbed = _is_of_a_collective(error)
            kind = refusals.is_meant(error), refusals.phase(error)
            ended = _Ended(artefacts.error_text(error), _place(error), *kind)
    if ranks is not None:
        ended = ranks.end(ended)
    if ended.text is not None:
        result |= {"text": ended.text, "meant": ended.meant, "phase": ended.phase}


def _is_of_a_collective(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.distributed.DistError)


def _place(error: BaseException) -> str:
    lines = (f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__))
    return " < ".join([type(error).__name__, *lines])


def in_turn(names: Iterable[str], results: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """The names to train for, one after the other, as long as the ranks stay together.

    Args:
        results: into which the caller puts the result of a training before it asks for the next name. It trains within
            :func:`training`, once or not at all, and where that gave a text, it needs no other rank afterwards.
            Names end after a training that the ranks ended differently, which gets :data:`FAILED_ON`, and after one in
            which a collective failed on all of them; names after it are missing.

    Raises:
        RankDesynchronised: other ranks wait for this one in such a training.
    """
    for name in names:
        print(f"{BEGINS}{name}", file=sys.stderr, flush=True)
        yield name
        ranks = _met[0] if _met else None
        if ranks is not None and ranks.parted:
            results[name][FAILED_ON] = ranks.failed
            if ranks.awaited:
                raise RankDesynchronised(name, dict(results))
            break
        if ranks is not None and ranks.disturbed:
            break
    print(ENDS, file=sys.stderr, flush=True)
