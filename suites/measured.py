"""What suites say of many numbers: that none at all is never right, and that NaN is never small.

Python's own ``all`` is true of nothing, and its ``max`` drops a NaN that does not come first. Used in the test process
and in ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["every", "largest"]


def every(conditions: Iterable[bool]) -> bool:
    """Whether all hold.

    Raises:
        AssertionError: there are none, so that nothing was measured.
    """
    conditions = list(conditions)
    assert conditions, "nothing was measured"
    return all(conditions)


def largest(numbers: Iterable[float]) -> float:
    """The largest number; infinity where one of them is NaN.

    Raises:
        AssertionError: there are none, so that nothing was measured.
    """
    numbers = list(numbers)
    assert numbers, "nothing was measured"
    return math.inf if any(math.isnan(number) for number in numbers) else max(numbers)
