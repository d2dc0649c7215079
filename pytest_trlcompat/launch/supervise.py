"""How long the ranks of a launch may go on: until all have ended, one has failed, or time is over.

The same for forked ranks and for those that a real launcher's command has started. Imports only the standard library.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Ranks", "supervise"]

# After the first failure the other ranks get this long to notice it by themselves, so that their own errors are seen.
_GRACE = 5.0
_POLL = 0.05


class Ranks(Protocol):
    """The ranks of a launch on this machine."""

    def running(self) -> bool:
        """Whether one of them has not ended."""

    def listen(self, limit: float) -> None:
        """Take what they have to say, for ``limit`` seconds at most."""

    def first_failed(self) -> int | None:
        """The number of the rank that failed first, if one did."""

    def dump_stacks(self) -> None:
        """Have all that run print where their threads stand."""

    def end(self, reason: str) -> None:
        """End all that run, and keep the first reason given."""


def supervise(ranks: Ranks, timeout: float) -> bool:
    """Stay with the ranks until the last has ended; ``True`` when ``timeout`` seconds passed before."""
    deadline = time.monotonic() + timeout
    failed_at: float | None = None
    while ranks.running():
        ranks.listen(_POLL)
        now = time.monotonic()
        failed = ranks.first_failed()
        if failed_at is None and failed is not None:
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE:
            ranks.end(f"rank {failed} had failed and this one did not end by itself")
        if now > deadline and ranks.running():
            ranks.dump_stacks()
            ranks.end(f"the launch's timeout of {timeout:g} s passed")
            return True
    return False
