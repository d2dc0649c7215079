"""The catalogue as it could have been written on an earlier day, without knowledge of any later release.

The project measures its predictions with it: asked about a past day, it must not predict from what came later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from packaging.version import Version

from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.ranges import ALL, Cut, Range

__all__ = ["cut_back"]

_NEWEST = ALL.intervals[0][1]
_EVERY_VERSION = ">=0"


def cut_back(
    catalog: Catalog, known: Mapping[str, Iterable[Version]], later: Mapping[str, Iterable[Version]]
) -> Catalog:
    """A catalogue whose predictions have no bound at a release that was not out yet.

    A range that begins at such a release is gone, and its prediction with it. One that ends there has no end: who had
    seen that the releases so far are broken would have expected the same of the next one. Between two releases that
    were out, such as before a later patch of an older series, the bound moves up to the next one that was.

    An issue of which no problem is left stays, and predicts nothing: its suite runs, and shows what nobody knew.

    Args:
        known: package to the releases that were out.
        later: package to those that came afterwards.
    """
    out = {package: sorted(versions) for package, versions in known.items()}
    coming = {package: sorted(versions) for package, versions in later.items()}
    return Catalog({name: _issue(issue, out, coming) for name, issue in catalog.items()})


_Releases = Mapping[str, Sequence[Version]]


def _issue(issue: KnownIssue, known: _Releases, later: _Releases) -> KnownIssue:
    cut = (part for prediction in issue.predictions for part in _prediction(prediction, known, later))
    return replace(issue, predictions=tuple(cut))


def _prediction(prediction: Prediction, known: _Releases, later: _Releases) -> Iterator[Prediction]:
    """None, one, or one for every combination of intervals: a range with a hole is no single specifier set."""
    if not any(later.get(package) for package in prediction.when):
        yield prediction
        return
    texts = []
    for package, versions in prediction.ranges.items():
        cut = _range(versions, known.get(package, ()), later[package]) if later.get(package) else versions
        texts.append([prediction.when[package]] if cut == versions else [*_specifiers(cut)])
    for chosen in itertools.product(*texts):
        yield replace(prediction, when=dict(zip(prediction.when, chosen, strict=True)))


def _range(versions: Range, known: Sequence[Version], later: Sequence[Version]) -> Range:
    cut = [(_moved(low, known, later), _moved(high, known, later)) for low, high in versions.intervals]
    merged: list[tuple[Cut, Cut]] = []
    for low, high in cut:
        if merged and low <= merged[-1][1]:  # the hole between the two was not there yet
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        elif low < high:
            merged.append((low, high))
    return Range(tuple(merged))


def _moved(cut: Cut, known: Sequence[Version], later: Sequence[Version]) -> Cut:
    """Where an end of a range would have been: one at a release that was not out yet moves to the next one that was."""
    if cut[0] != 1:
        return cut  # no release stands there
    above = next((version for version in known if _beyond(version, cut)), None)
    if above is None:
        return _NEWEST
    if any(_beyond(version, cut) and version < above for version in later):
        return (1, above, 0)
    return cut


def _beyond(version: Version, cut: Cut) -> bool:
    after: bool = (1, version, 0) >= cut
    return after


def _specifiers(cut: Range) -> Iterator[str]:
    for interval in cut.intervals:
        text = Range((interval,)).describe()
        yield _EVERY_VERSION if text == "any version" else text
