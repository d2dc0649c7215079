"""How much a function does, by a number that is the same in every run."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["calls"]


def calls(function: Callable[[], object]) -> int:
    """How many functions are called, of Python or in C: it grows as the time does, and is the same every time."""
    number = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return number
