"""What a person reads while the hunt goes on: one line when a candidate begins, one when it ends, with times.

Imports only the standard library and this room.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pytest_trlcompat.bisect.candidates.base import Candidate
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.standard import Judgement, Standard

__all__ = ["Progress", "duration"]


@dataclass
class Progress:
    """Lines for the terminal.

    Attributes:
        ran: seconds of each candidate that this command ran, from which the time left is guessed.
    """

    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    ran: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    def testing(self, candidate: Candidate, steps_left: int | None = None, *, again: bool = False) -> None:
        once_more = " once more" if again else ""
        if steps_left is None:
            self.say(f"testing {candidate.label}{once_more}")
            return
        steps = f"about {steps_left} step{'' if steps_left == 1 else 's'} left"
        if self.ran:
            steps += f", {duration(steps_left * sum(self.ran) / len(self.ran))}"
        self.say(f"testing {candidate.label}{once_more}, {steps}")

    def ahead(self, candidate: Candidate) -> None:
        self.say(f"  ahead of time: {candidate.label}")

    def standard(self, standard: Standard) -> None:
        self.say(f"bad is: {standard}")

    def tested(
        self,
        candidate: Candidate,
        judgement: Judgement,
        observation: Observation,
        *,
        certain: bool,
        kept: bool,
        reused: str | None = None,
    ) -> None:
        seconds = observation.seconds + observation.build_seconds
        if reused is not None:
            how = f"the versions of {reused}, not run again"
        elif kept:
            how = "kept from an earlier run"
        else:
            self.ran.append(seconds)
            built = "in place" if observation.reused else f"{observation.build_seconds:.0f} s"
            how = f"{seconds:.0f} s, environment {built}"
        # The first end is neither good nor bad before the other one is known.
        what = f"{judgement.answer} ({judgement.why})" if certain else judgement.why
        self.say(f"  {candidate.label}: {what} [{how}]")


def duration(seconds: float) -> str:
    """``40 s``, ``3 min``, ``1.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
