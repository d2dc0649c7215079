"""Minutes and gigabytes."""

from __future__ import annotations

import signal
import time

import pytest

from pytest_trlcompat.watch.budget import Budget, OutOfTime


def test_when_the_minutes_are_over_what_runs_is_stopped() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(OutOfTime, match=r"0\.001 minutes are over"), Budget(0.001, None, lambda: 0).running():
        time.sleep(60)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_without_minutes_nothing_is_stopped() -> None:
    with Budget(None, None, lambda: 0).running():
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_is_gone_from_the_disk_counts() -> None:
    free = [10_000_000_000]
    budget = Budget(None, 2, lambda: free[0])
    assert not budget.is_full
    with budget.running():
        assert (budget.used, budget.is_full) == (0, False)
        free[0] = 7_500_000_000
        assert (budget.used, budget.is_full) == (2_500_000_000, True)
        free[0] = 11_000_000_000  # somebody else has removed something
        assert (budget.used, budget.is_full) == (0, False)
