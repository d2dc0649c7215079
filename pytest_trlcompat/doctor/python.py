"""Whether the published sweep was measured with a stack's Python. Imports no package of the stack."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from pytest_trlcompat import _data
from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.doctor.stack_spec import StackSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["other_python"]

_OWN = re.compile(r"-py(\d+\.\d+)$")
"""What the name of a cell ends with that has another Python than most."""


def other_python(spec: StackSpec, cells: Iterable[MeasuredCell]) -> str:
    """``measured with Python 3.10 to 3.13, yours is 3.14``; empty if it lies between measured ones, or is not known."""
    if not spec.python:
        return ""
    own = [_OWN.search(cell.id) for cell in cells]
    measured = {_number(found[1]) for found in own if found}
    if None in own:
        measured.add(_number(_usual()))
    if not measured or min(measured) <= _number(spec.python) <= max(measured):
        return ""
    first, last = (".".join(map(str, end)) for end in (min(measured), max(measured)))
    return f"measured with Python {first if first == last else f'{first} to {last}'}, yours is {spec.python}"


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _usual() -> str:
    """The Python of every cell that does not name one."""
    with open(_data.fixtures() / "matrix.toml", "rb") as file:
        return str(tomllib.load(file)["defaults"]["python"])
