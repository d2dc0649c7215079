"""What a person reads during a bisect: one line when a candidate's test begins, one when it ends, with times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pytest_trlcompat.bisect.candidates import Candidate
from pytest_trlcompat.bisect.failure_signature import FailureSignature, Judgement
from pytest_trlcompat.bisect.observation import Observation

__all__ = ["Progress", "duration"]


@dataclass
class Progress:
    """Lines for the terminal.

    Attributes:
        run_seconds: of each candidate that this command has tested, from which the time left is estimated.
    """

    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    run_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    def testing(self, candidate: Candidate, steps_left: int | None = None, *, again: bool = False) -> None:
        label = f"{candidate.label} again" if again else candidate.label
        if steps_left is None:
            self.say(f"testing {label}")
            return
        steps = f"about {steps_left} step{'' if steps_left == 1 else 's'} left"
        if self.run_seconds:
            steps += f", {duration(steps_left * sum(self.run_seconds) / len(self.run_seconds))}"
        self.say(f"testing {label}, {steps}")

    def testing_ahead(self, candidate: Candidate) -> None:
        self.say(f"  testing ahead of time: {candidate.label}")

    def signature(self, signature: FailureSignature) -> None:
        self.say(f"bad means: {signature}")

    def tested(
        self,
        candidate: Candidate,
        judgement: Judgement,
        observation: Observation,
        *,
        certain: bool,
        from_journal: bool,
        reused: str | None = None,
    ) -> None:
        seconds = observation.seconds + observation.build_seconds
        if reused is not None:
            how = f"same versions as {reused}, not run again"
        elif from_journal:
            how = "from an earlier run"
        else:
            self.run_seconds.append(seconds)
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
