"""Which of a stack's releases no cell of the published sweep has: about these everything is predicted from others.

Imports no package of the stack.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from packaging.version import Version

from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.catalog.ranges import ALL
from pytest_trlcompat.doctor.pins import is_at
from pytest_trlcompat.doctor.stack_spec import ORDER, StackSpec

__all__ = ["describe", "unmeasured_releases"]

_TOGETHER = ("trl", "transformers")


def unmeasured_releases(
    spec: StackSpec, cells: Sequence[MeasuredCell], packages: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Packages of which no cell has the stack's version, or one of its range, each with the measured ones around it.

    If each of TRL and Transformers was measured, but no cell has both: the key is ``trl and transformers``, with no
    releases.

    Args:
        packages: those that matter. Torch is not among the answers: of it the doctor compares minor releases.
    """
    found: dict[str, tuple[str, ...]] = {}
    named = [package for package in ORDER if package in packages and package != "torch"]
    for package in named:
        wanted = spec.versions.get(package)
        if wanted is None or wanted.covers(ALL) or any(is_at(cell, package, wanted) for cell in cells):
            continue
        measured = sorted({cell.versions[package] for cell in cells if package in cell.versions}, key=Version)
        found[package] = _around(spec.pinned.get(package), measured)
    together = [package for package in _TOGETHER if package in spec.pinned and package not in found]
    if len(together) == len(_TOGETHER) and not any(
        all(is_at(cell, package, spec.versions[package]) for package in together) for cell in cells
    ):
        found[" and ".join(_TOGETHER)] = ()
    return found


def _around(version: Version | None, measured: Sequence[str]) -> tuple[str, ...]:
    """The newest measured release before a version and the oldest after it; none for a range."""
    if version is None:
        return ()
    before = [text for text in measured if Version(text) < version]
    after = [text for text in measured if Version(text) > version]
    return (*before[-1:], *after[:1])


def describe(found: Mapping[str, Sequence[str]], texts: Mapping[str, str]) -> str:
    """``trl 0.22.1 (nearest: 0.21.0, 0.22.2), trl 0.15.2 with transformers 5.1.0``; empty if all were measured.

    Args:
        texts: what was said about each package.
    """
    parts = []
    for key, around in found.items():
        stack = " with ".join(f"{package} {texts.get(package, '')}" for package in key.split(" and "))
        parts.append(stack + (f" (nearest: {', '.join(around)})" if around else ""))
    return ", ".join(parts)
