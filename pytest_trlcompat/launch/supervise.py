"""Supervises the ranks of a launch until all have ended, one has failed, or the timeout has passed.

The same for forked ranks and for those that a real launcher's command has started.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Ranks", "supervise"]

# After the first failure the other ranks have this long to fail by themselves, so that their own errors are reported.
_GRACE = 5.0
_POLL = 0.05


class Ranks(Protocol):
    """The ranks of a launch on this machine."""

    def running(self) -> bool:
        """Whether any of them has not ended."""

    def listen(self, limit: float) -> None:
        """Receive their messages, for at most ``limit`` seconds."""

    def first_failed(self) -> int | None:
        """The number of the rank that failed first, if one did."""

    def dump_stacks(self) -> None:
        """Have the running ranks print the stacks of their threads."""

    def end(self, reason: str) -> None:
        """End the running ranks; the first reason is kept."""


def supervise(ranks: Ranks, timeout: float, debugged: int | None = None) -> bool:
    """Wait until the last rank has ended; returns ``True`` if ``timeout`` seconds passed before that.

    Args:
        debugged: the rank that a person debugs; it is not ended because another has failed.
    """
    deadline = time.monotonic() + timeout
    failed_at: float | None = None
    while ranks.running():
        ranks.listen(_POLL)
        now = time.monotonic()
        failed = ranks.first_failed()
        if failed_at is None and failed is not None:
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE and debugged in (None, failed):
            ranks.end(f"rank {failed} had failed and this one did not end by itself")
        # Asked again, since listen may have just seen the last one end: that is no timeout.
        if now > deadline and ranks.running():
            # Before they are ended: a killed rank can no longer tell where it was.
            ranks.dump_stacks()
            ranks.end(f"the launch's timeout of {timeout:g} s passed")
            return True
    return False
