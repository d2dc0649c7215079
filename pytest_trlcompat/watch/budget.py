"""How long a watch may run, and how much of the disk it may take."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

__all__ = ["Budget", "OutOfTime"]


class OutOfTime(KeyboardInterrupt):
    """The minutes are spent. What runs ends as at Ctrl-C: nothing of it is left, and finished verdicts are kept."""


@dataclass(frozen=True)
class Budget:
    """What one command may use.

    Attributes:
        minutes: of wall-clock time; ``None``: as many as it takes.
        gigabytes: of the disk of the environments; ``None``: all that is free.
        free: asks how many bytes are free there. What others write to that disk meanwhile counts as well.
    """

    minutes: float | None
    gigabytes: float | None
    free: Callable[[], int]
    started: float = field(default_factory=time.monotonic)
    _free_at_first: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Raise :class:`OutOfTime` within the block when the minutes are spent. In the main thread alone."""
        self._free_at_first[:] = [self.free()]
        left = self.seconds_left
        if left is None:
            yield
            return
        before = signal.signal(signal.SIGALRM, self._end)
        # 0 would turn the timer off, though the time is over.
        signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @property
    def seconds_left(self) -> float | None:
        return None if self.minutes is None else self.started + 60 * self.minutes - time.monotonic()

    @property
    def used(self) -> int:
        """Bytes of the disk that are gone since the start."""
        return max(0, self._free_at_first[0] - self.free()) if self._free_at_first else 0

    @property
    def is_full(self) -> bool:
        """Whether no other environment may be built."""
        return self.gigabytes is not None and self.used >= 1e9 * self.gigabytes

    def _end(self, number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"{self.minutes:g} minutes are over")
