"""How a stack lies beyond what was measured: its torch, its Python, and releases that no cell has.

What the doctor says about such a stack is predicted from other releases.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from packaging.version import Version

from pytest_trlcompat import _data
from pytest_trlcompat.catalog.ranges import ALL, Range, at, minor_release
from pytest_trlcompat.doctor.stack_spec import ORDER, StackSpec

if TYPE_CHECKING:  # pytest's header asks for torch alone, and imports neither the measurements nor the trainers
    from pytest_trlcompat.doctor.neighbours import Neighbours

__all__ = ["describe", "other_python", "other_torch", "torch_of_same_pins", "unmeasured_releases"]

_TOGETHER = ("trl", "transformers")
_PYTHON_OF_CELL = re.compile(r"-py(\d+\.\d+)$")
"""What the name of a cell ends with that has another Python than most."""


def other_torch(spec: StackSpec, measured: Iterable[str]) -> str:
    """``measured with torch 2.13.0, yours is 2.6.0``; empty if its minor release was measured, or is not known.

    Args:
        measured: releases of torch.
    """
    versions = spec.versions.get("torch")
    releases = sorted(set(map(Version, measured)))
    if versions is None or not releases:
        return ""
    minors = list(map(minor_release, releases))
    named = str(releases[0]) if len(releases) == 1 else f"{', '.join(map(str, releases[:-1]))} and {releases[-1]}"
    if not any(versions.meets(minor) for minor in minors):
        return f"measured with torch {named}, yours is {spec.texts.get('torch', '')}"
    # Of the versions of a lock's forks each may be the one that is installed.
    forks = [Range((interval,)).version for interval in versions.intervals]
    others = [fork for fork in forks if fork is not None and not any(minor.covers(at(str(fork))) for minor in minors)]
    return f"measured with torch {named}, not with {' or '.join(map(str, others))}" if others else ""


def torch_of_same_pins(neighbours: Neighbours) -> str:
    """How the stack's torch differs from those with which its TRL and Transformers were measured; may be empty."""
    if not neighbours.pinned.keys() >= set(_TOGETHER):
        return ""
    same = neighbours.here(_TOGETHER)
    torches = [text for text, cells in neighbours.measured.having("torch").items() if text and cells & same]
    differs = other_torch(neighbours.spec, torches)
    return differs and f"{' with '.join(f'{package} {neighbours.pinned[package]}' for package in _TOGETHER)}: {differs}"


def other_python(spec: StackSpec, cells: Iterable[str]) -> str:
    """``measured with Python 3.10 to 3.13, yours is 3.14``; empty if it lies between measured ones, or is not known.

    Args:
        cells: ids of those that were measured.
    """
    if not spec.python:
        return ""
    suffixes = [_PYTHON_OF_CELL.search(cell) for cell in cells]
    measured = {_number(suffix[1]) for suffix in suffixes if suffix}
    if None in suffixes:
        measured.add(_number(_usual_python()))
    if not measured or min(measured) <= _number(spec.python) <= max(measured):
        return ""
    first, last = (".".join(map(str, end)) for end in (min(measured), max(measured)))
    return f"measured with Python {first if first == last else f'{first} to {last}'}, yours is {spec.python}"


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _usual_python() -> str:
    """The Python of every cell that does not name one."""
    if sys.version_info >= (3, 11):  # few questions have a Python
        import tomllib
    else:
        import tomli as tomllib

    with open(_data.fixtures() / "matrix.toml", "rb") as file:
        return str(tomllib.load(file)["defaults"]["python"])


def unmeasured_releases(neighbours: Neighbours, packages: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Packages whose version in the stack no cell has, each with the measured releases before and after it.

    If the stack's TRL and its Transformers were both measured, but in no cell together, the key is ``trl and
    transformers``, with no releases.

    Args:
        packages: those that matter. Torch is never in the answer, because the doctor compares only its minor releases.
    """
    around: dict[str, tuple[str, ...]] = {}
    for package in ORDER:
        if package not in packages or package == "torch":
            continue
        versions = neighbours.spec.versions.get(package)
        if versions is None or versions.covers(ALL) or neighbours.at(package):
            continue
        measured = sorted(filter(None, neighbours.measured.having(package)), key=Version)
        around[package] = _around(neighbours.pinned.get(package), measured)
    together = [package for package in _TOGETHER if package in neighbours.pinned and package not in around]
    if len(together) == len(_TOGETHER) and not neighbours.here(together):
        around[" and ".join(_TOGETHER)] = ()
    return around


def _around(version: Version | None, measured: Sequence[str]) -> tuple[str, ...]:
    """The newest measured release before a version and the oldest after it; none for a range."""
    if version is None:
        return ()
    before = [text for text in measured if Version(text) < version]
    after = [text for text in measured if Version(text) > version]
    return (*before[-1:], *after[:1])


def describe(unmeasured: Mapping[str, Sequence[str]], texts: Mapping[str, str]) -> str:
    """``trl 0.22.1 (nearest: 0.21.0, 0.22.2), trl 0.15.2 with transformers 5.1.0``; empty if all were measured.

    Args:
        texts: what was said about each package.
    """
    parts = []
    for key, nearest in unmeasured.items():
        stack = " with ".join(f"{package} {texts.get(package, '')}" for package in key.split(" and "))
        parts.append(stack + (f" (nearest: {', '.join(nearest)})" if nearest else ""))
    return ", ".join(parts)
