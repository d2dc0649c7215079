"""Version ranges as sets on a line, so that they can be intersected, compared and described.

``packaging`` answers whether one version lies in a range. The catalogue's boundaries, and answers for a stack of which
only a part is known, need more: whether a range is empty, whether it holds all over another one, and on which pieces.
Imports only the standard library and ``packaging``.

A range is a sequence of intervals between *cuts*. A cut lies just before a version (``>=`` and ``<`` cut there) or just
after it (``>`` and ``<=``), so every interval holds its left cut's side and no bound needs to be called open or closed.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import InvalidSpecifier, Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version

__all__ = ["ALL", "Cut", "Range", "at", "parse", "pieces"]

Cut = tuple[Any, ...]
"""``(1, version, 0)`` just before a version, ``(1, version, 1)`` just after it; compared as tuples."""

_OLDEST: Cut = (0,)
_NEWEST: Cut = (2,)
_BEFORE, _AFTER = 0, 1


@dataclass(frozen=True)
class Range:
    """Versions of one package: disjoint intervals from old to new, none of them empty."""

    intervals: tuple[tuple[Cut, Cut], ...]

    def __bool__(self) -> bool:
        """Whether any version lies in it."""
        return bool(self.intervals)

    def __and__(self, other: Range) -> Range:
        both = (
            (max(low, other_low), min(high, other_high))
            for low, high in self.intervals
            for other_low, other_high in other.intervals
        )
        return Range(tuple(sorted((low, high) for low, high in both if low < high)))

    def __or__(self, other: Range) -> Range:
        merged: list[tuple[Cut, Cut]] = []
        for low, high in sorted((*self.intervals, *other.intervals)):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return Range(tuple(merged))

    def covers(self, other: Range) -> bool:
        """Whether every version of ``other`` lies in this range."""
        # Intervals are disjoint and do not touch, so each has to lie in one; the doctor compares thousands of times.
        return all(
            any(low <= other_low and other_high <= high for low, high in self.intervals)
            for other_low, other_high in other.intervals
        )

    @property
    def version(self) -> Version | None:
        """The one version that it holds, ``None`` where it holds another number of them."""
        if len(self.intervals) == 1:
            low, high = self.intervals[0]
            if low[0] == high[0] == 1 and low[1] == high[1]:
                found: Version = low[1]
                return found
        return None

    def from_here(self) -> str:
        """Its older end as a range: ``>=0.18``."""
        return _interval(self.intervals[0][0], _NEWEST, {_OLDEST, _NEWEST})

    def describe(self, within: Range | None = None) -> str:
        """``>=1.0,<1.9 or >=2.0``; ends that are those of ``within``, where nothing else is possible, are left out."""
        ends = {end for interval in (within or ALL).intervals for end in interval}
        return " or ".join(_interval(low, high, ends) for low, high in self.intervals) or "no version"


def _interval(low: Cut, high: Cut, ends: set[Cut]) -> str:
    if low[0] == high[0] == 1 and low[1] == high[1]:
        return f"=={low[1]}"
    parts = []
    if low not in ends:
        parts.append(f"{'>' if low[2] else '>='}{low[1]}")
    if high not in ends:
        parts.append(f"{'<=' if high[2] else '<'}{high[1]}")
    return ",".join(parts) or "any version"


ALL = Range(((_OLDEST, _NEWEST),))
"""Every version."""


@functools.cache
def parse(text: str) -> Range:
    """Read a :pep:`440` specifier set; ``""`` is every version.

    Raises:
        ValueError: it is none.
    """
    try:
        specifiers = SpecifierSet(text)
        found = ALL
        for specifier in specifiers:
            found &= _specifier(specifier)
    except (InvalidSpecifier, InvalidVersion) as error:
        raise ValueError(f"malformed version range {text!r}; write it like '>=0.15,<0.18' or '==4.48.*'") from error
    return found


def _specifier(specifier: Specifier) -> Range:
    operator, text = specifier.operator, specifier.version
    if operator in ("==", "!=") and text.endswith(".*"):
        prefix = Version(text[:-2])
        inside = _between((1, prefix, _BEFORE), (1, _after_prefix(prefix.release), _BEFORE))
    else:
        version = Version(text)
        before, after = (1, version, _BEFORE), (1, version, _AFTER)
        inside = {
            # Written for "whatever is installed"; nobody has a pre-release of version 0.
            ">=": ALL if version == Version("0") else _between(before, _NEWEST),
            ">": _between(after, _NEWEST),
            "<": _between(_OLDEST, before),
            "<=": _between(_OLDEST, after),
            "~=": _between(before, (1, _after_prefix(version.release[:-1] or version.release), _BEFORE)),
        }.get(operator, _between(before, after))
    return _complement(inside) if operator == "!=" else inside


def _between(low: Cut, high: Cut) -> Range:
    return Range(((low, high),) if low < high else ())


def _complement(one: Range) -> Range:
    ((low, high),) = one.intervals
    return Range(((_OLDEST, low), (high, _NEWEST)))


def _after_prefix(release: Sequence[int]) -> Version:
    """The first release that does not start so: ``4.49`` after ``4.48``."""
    return Version(".".join(map(str, (*release[:-1], release[-1] + 1))))


@functools.cache
def at(text: str) -> Range:
    """Where an installed version stands.

    A local build (``2.13.0+cpu``) stands where its release stands. Of a pre-release (``0.18.0.dev0``) nobody knows what
    of its release it holds, so it stands anywhere from itself to its release.

    Raises:
        ValueError: not a :pep:`440` version.
    """
    try:
        version = Version(Version(text).public)
    except InvalidVersion as error:
        raise ValueError(f"{text!r} is not a PEP 440 version") from error
    newest = Version(version.base_version) if version.is_prerelease else version
    return _between((1, version, _BEFORE), (1, newest, _AFTER))


def pieces(domain: Range, ranges: Iterable[Range]) -> list[Range]:
    """Cut ``domain`` so that each of ``ranges`` holds all over a piece, or nowhere on it; from old to new."""
    cuts = sorted({cut for each in ranges for interval in each.intervals for cut in interval})
    found = []
    for low, high in domain.intervals:
        inner = [cut for cut in cuts[bisect_right(cuts, low) :] if cut < high]
        found += [Range((interval,)) for interval in zip([low, *inner], [*inner, high], strict=True)]
    return found
