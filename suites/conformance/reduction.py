"""The fewest values of a setting with which a quantity still differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["smallest"]


def smallest(setting: Mapping[str, Any], differs: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """A part of the setting with which the quantity differs, and no longer does with any value fewer.

    By delta debugging, as bisection finds the packages that broke something.

    Args:
        differs: trains with a part of the setting; it is not called with all of it, of which it is known.
    """
    from pytest_trlcompat.bisect.attribution import ddmin
    from pytest_trlcompat.bisect.search import Answer

    def test(chosen: frozenset[str]) -> Answer:
        part = {name: value for name, value in setting.items() if name in chosen}
        return Answer.BAD if differs(part) else Answer.GOOD

    # It differs without any value as well, so that none of them is to blame.
    if not setting or test(frozenset()) is Answer.BAD:
        return {}
    names = ddmin(list(setting), test, Answer.BAD)
    return {name: setting[name] for name in names}
