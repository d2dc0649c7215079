"""Version ranges as sets on a line, so that they can be intersected, compared and described.

``packaging`` answers whether one version lies in a range. The catalogue's boundaries, and answers for a stack of which
only a part is known, need more: whether a range is empty, whether it holds all over another one, and on which pieces.

A range is a sequence of intervals between *cuts*. A cut lies just before a version (``>=`` and ``<`` cut there) or just
after it (``>`` and ``<=``), so every interval holds its left cut's side and no bound needs to be called open or closed.
That a package may not be installed is an interval before all versions, :data:`ABSENT`, which no version range holds.

Ranges come from files of strangers, so every operation takes time in proportion to the number of intervals.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from packaging.specifiers import Specifier

__all__ = [
    "ABSENT",
    "ALL",
    "Cut",
    "Range",
    "at",
    "both",
    "either",
    "minor_release",
    "parse",
    "pieces",
    "remember",
    "restored",
]

Cut = tuple[Any, ...]
"""``(1, version, 0)`` just before a version, ``(1, version, 1)`` just after it; compared as tuples."""

_NOT_INSTALLED: Cut = (-1,)
_OLDEST: Cut = (0,)
_NEWEST: Cut = (2,)
_BEYOND: Cut = (3,)
"""Behind every cut."""
_BEFORE, _AFTER = 0, 1


@dataclass(frozen=True)
class Range:
    """Versions of one package: disjoint intervals from old to new, none of them empty."""

    intervals: tuple[tuple[Cut, Cut], ...]

    def __bool__(self) -> bool:
        """Whether any version lies in it."""
        return bool(self.intervals)

    def __and__(self, other: Range) -> Range:
        overlap = []
        ours, theirs = self.intervals, other.intervals
        here = there = 0
        while here < len(ours) and there < len(theirs):
            (low, high), (other_low, other_high) = ours[here], theirs[there]
            first, last = max(low, other_low), min(high, other_high)
            if first < last:
                overlap.append((first, last))
            # The interval that ends first meets nothing more of the other range.
            if high < other_high:
                here += 1
            else:
                there += 1
        return Range(tuple(overlap))

    def __or__(self, other: Range) -> Range:
        return either((self, other))

    def __sub__(self, other: Range) -> Range:
        """The part of this range that ``other`` does not hold."""
        return self & other._gaps()

    def covers(self, other: Range) -> bool:
        """Whether every version of ``other`` lies in this range."""
        # Intervals are disjoint and do not touch, so each has to lie in one.
        if len(self.intervals) == len(other.intervals) == 1:  # asked tens of thousands of times
            (low, high), (other_low, other_high) = self.intervals[0], other.intervals[0]
            return low <= other_low and other_high <= high
        # meets() walks through the shorter of two: a stranger's range may have thousands of intervals.
        if len(other.intervals) > len(self.intervals):
            return not other.meets(self._gaps())
        for other_low, other_high in other.intervals:
            # Nothing lies behind _BEYOND, so an interval that begins at the same cut counts as well.
            before = bisect_right(self.intervals, (other_low, _BEYOND))
            if not before or self.intervals[before - 1][1] < other_high:
                return False
        return True

    def _gaps(self) -> Range:
        """What it does not hold."""
        ends = [_NOT_INSTALLED, *(cut for interval in self.intervals for cut in interval), _NEWEST]
        return Range(tuple((low, high) for low, high in zip(ends[::2], ends[1::2], strict=True) if low < high))

    def meets(self, other: Range) -> bool:
        """Whether some version lies in both."""
        fewer, more = self.intervals, other.intervals
        if len(fewer) > len(more):
            fewer, more = more, fewer
        for low, high in fewer:
            # A tuple of one sorts before every interval that begins at this end, and these do not meet it.
            after = bisect_right(more, (high,))
            if after and more[after - 1][1] > low:
                return True
        return False

    @property
    def version(self) -> Version | None:
        """The one version that it holds, ``None`` where it holds another number of them."""
        if len(self.intervals) == 1:
            low, high = self.intervals[0]
            if low[0] == high[0] == 1 and low[1] == high[1]:
                version: Version = low[1]
                return version
        return None

    def from_here(self) -> str:
        """Its older end as a range: ``>=0.18``."""
        return _interval(self.intervals[0][0], _NEWEST, {_OLDEST, _NEWEST})

    def describe(self, within: Range | None = None) -> str:
        """``>=1.0,<1.9 or >=2.0``; ends that are those of ``within``, where nothing else is possible, are left out."""
        first, rest = self.intervals[: _DESCRIBED + 1], len(self.intervals) - _DESCRIBED
        absent = bool(first) and first[0][0] == _NOT_INSTALLED
        # That it may be missing is a part of its own in the text, and the versions behind that another.
        if absent:
            first = (*(((_OLDEST, first[0][1]),) if first[0][1] > _OLDEST else ()), *first[1:])
        possible = within or ALL
        parts = [_interval(low, high, {end for end in (low, high) if possible._ends_at(end)}) for low, high in first]
        if rest > 0:
            parts[_DESCRIBED:] = [f"{rest} more ranges"]
        return " or ".join([*parts, *(["not installed"] if absent else [])]) or "no version"

    def stored(self) -> str:
        """A text from which :func:`restored` makes it ten times as fast as :func:`parse` would from specifiers."""
        cuts = (cut for interval in self.intervals for cut in interval)
        return " ".join(str(cut[0]) if len(cut) == 1 else f"{cut[1]}{'-+'[cut[2]]}" for cut in cuts)

    def _ends_at(self, cut: Cut) -> bool:
        """Whether one of its intervals begins or ends there; before the oldest version every range does."""
        before = bisect_right(self.intervals, (cut, _BEYOND)) - 1
        return cut == _OLDEST or (before >= 0 and cut in self.intervals[before])


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
ABSENT = Range(((_NOT_INSTALLED, _OLDEST),))
"""No version: the package is not installed."""
_DESCRIBED = 20
"""How many intervals are written out; a person writes one or two."""
_LONGEST_VERSION = 200
"""Characters; the longest version on the package index has less than half."""


def either(ranges: Iterable[Range]) -> Range:
    """The versions that lie in one of the ranges."""
    merged: list[tuple[Cut, Cut]] = []
    # By their older ends, so that an interval can touch none but the last one.
    for low, high in sorted(interval for versions in ranges for interval in versions.intervals):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return Range(tuple(merged))


def both(ranges: Iterable[Range]) -> Range:
    """The versions that lie in all of the ranges; of none of them, every version or none installed."""
    everything = ABSENT | ALL
    # By complements all ends are sorted once; one intersection after the other would take the square of many ``!=``.
    return everything - either(everything - versions for versions in ranges)


@functools.cache
def parse(text: str) -> Range:
    """Read a :pep:`440` specifier set; ``""`` is every version.

    Raises:
        ValueError: it is none, or one of its versions has an epoch, which no release of the stack has.
    """
    if text in _REMEMBERED:
        return restored(_REMEMBERED[text])
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # most processes only meet remembered ranges

    try:
        specifiers = [_specifier(specifier) for specifier in SpecifierSet(text)]
    except (InvalidSpecifier, InvalidVersion) as error:
        raise ValueError(
            f"malformed version range {_short(text)}; write it like '>=0.15,<0.18' or '==4.48.*'"
        ) from error
    return both((ALL, *specifiers))


def remember(stored: Mapping[str, str]) -> None:
    """Make :func:`parse` return ranges that :meth:`Range.stored` wrote; reading specifiers takes ten times as long."""
    _REMEMBERED.update(stored)


_REMEMBERED: dict[str, str] = {}


def _short(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_VERSION else f"{text[:_LONGEST_VERSION]}...")


def _version(text: str) -> Version:
    """
    Raises:
        InvalidVersion: it is none.
        ValueError: it has an epoch, or is too long to be a version.
    """
    if len(text) > _LONGEST_VERSION:
        raise ValueError(f"{_short(text)} is longer than any version")
    version = Version(text)
    if version.epoch:
        raise ValueError(f"{text!r} has an epoch ({version.epoch}!), and no release of these packages has one")
    return version


def _specifier(specifier: Specifier) -> Range:
    operator, text = specifier.operator, specifier.version
    if operator in ("==", "!=") and text.endswith(".*"):
        # Pre-releases of the upper end lie within (4.49.dev0 in ==4.48.*), other than PEP 440 has it; so with "<".
        # Since at() has one stand anywhere up to its release, such a range meets it, and never covers it.
        prefix = _version(text[:-2])
        inside = _between((1, prefix, _BEFORE), (1, _after_prefix(prefix.release), _BEFORE))
    else:
        version = _version(text)
        before, after = (1, version, _BEFORE), (1, version, _AFTER)
        inside = {
            # Written for "whatever is installed"; nobody has a pre-release of version 0.
            ">=": ALL if version == Version("0") else _between(before, _NEWEST),
            ">": _between(after, _NEWEST),
            "<": _between(_OLDEST, before),
            "<=": _between(_OLDEST, after),
            "~=": _between(before, (1, _after_prefix(version.release[:-1] or version.release), _BEFORE)),
        }.get(operator, _between(before, after))
    return ALL - inside if operator == "!=" else inside


def _between(low: Cut, high: Cut) -> Range:
    return Range(((low, high),) if low < high else ())


def _after_prefix(release: Sequence[int]) -> Version:
    """The first release that does not start so: ``4.49`` after ``4.48``."""
    return Version(".".join(map(str, (*release[:-1], release[-1] + 1))))


@functools.cache
def at(text: str) -> Range:
    """Where an installed version stands.

    A local build (``2.13.0+cpu``) stands where its release stands. Of a pre-release (``0.18.0.dev0``) nobody knows what
    of its release it holds, so it stands anywhere from itself to its release.

    Raises:
        ValueError: not a :pep:`440` version, or one with an epoch, which no release of the stack has.
    """
    try:
        version = Version(_version(text).public)
    except InvalidVersion as error:
        raise ValueError(f"{text!r} is not a PEP 440 version") from error
    newest = version
    if version.is_prerelease:
        # A dev release of a post release comes after the release itself.
        post = "" if version.post is None or version.pre else f".post{version.post}"
        newest = Version(version.base_version + post)
    return _between((1, version, _BEFORE), (1, newest, _AFTER))


@functools.cache
def restored(text: str) -> Range:
    """The range of which :meth:`Range.stored` made a text."""
    cuts = [(1, Version(cut[:-1]), "-+".index(cut[-1])) if cut[-1] in "-+" else (int(cut),) for cut in text.split()]
    return Range(tuple(zip(cuts[::2], cuts[1::2], strict=True)))


def minor_release(version: Version) -> Range:
    """All releases of a version's minor release."""
    major, minor = version.major, version.minor
    return _between((1, Version(f"{major}.{minor}"), _BEFORE), (1, Version(f"{major}.{minor + 1}"), _BEFORE))


def pieces(domain: Range, ranges: Iterable[Range]) -> list[Range]:
    """Cut ``domain`` so that each of ``ranges`` holds all over a piece, or nowhere on it; from old to new.

    There are at most as many as the ranges have ends, and one more, of however many intervals the domain is: what no
    end of a range separates is one piece.
    """
    cuts = sorted({cut for versions in ranges for interval in versions.intervals for cut in interval})
    intervals = domain.intervals
    parts = []
    for low, high in zip([_NOT_INSTALLED, *cuts], [*cuts, _NEWEST], strict=True):
        first = bisect_right(intervals, (low, _BEYOND)) - 1
        # That interval may end before this piece begins.
        first += first < 0 or intervals[first][1] <= low
        inside = intervals[first : bisect_left(intervals, (high,))]
        if inside and low < high:
            start, end = max(low, inside[0][0]), min(high, inside[-1][1])
            if len(inside) == 1:
                parts.append(Range(((start, end),)))
            else:
                parts.append(Range(((start, inside[0][1]), *inside[1:-1], (inside[-1][0], end))))
    return parts
