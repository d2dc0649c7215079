"""The order of mixins: those of which the position matters say so, and a class that mixes them wrongly is refused.

Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = ["Ordered", "check_order"]

_PACKAGE = __name__.rpartition(".")[0]


def check_order(cls: type) -> None:
    """Refuse a class in which a mixin stands behind one that it must stand before.

    Raises:
        TypeError: with both, and the reason.
    """
    behind = {base.__name__: number for number, base in enumerate(cls.__mro__) if base.__module__.startswith(_PACKAGE)}
    for number, base in enumerate(cls.__mro__):
        for other, reason in vars(base).get("_stands_before", {}).items():
            if behind.get(other, number) < number:
                raise TypeError(
                    f"{cls.__name__}: {base.__name__} must stand before {other} among the bases, and stands behind it; "
                    f"{reason}"
                )


class Ordered:
    """A mixin whose position among others matters.

    Attributes:
        _stands_before: names of the mixins that must stand behind it, each with the reason.
    """

    _stands_before: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_order(cls)
