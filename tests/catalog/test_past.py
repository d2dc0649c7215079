"""The catalogue cut back to an earlier day: what it knew then stays, and nothing of it comes from later."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from packaging.version import Version

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import SUBJECTS, KnownIssue, Prediction
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.past import cut_back
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix.covering.releases import read_listing

ROOT = Path(__file__).resolve().parents[2]
DAYS = [datetime.date(2025, 3, 1), datetime.date(2026, 1, 1), datetime.date(2026, 6, 1), datetime.date(2026, 7, 12)]


def issue(*predictions: tuple[str, dict[str, str]]) -> KnownIssue:
    return KnownIssue(
        id="grpo-x",
        title="t",
        wrong="w",
        upstream=(),
        suite="s",
        cure="",
        symptoms=(),
        predictions=tuple(Prediction(Verdict(verdict), "upstream", when, (), "why") for verdict, when in predictions),
    )


def cut(one: KnownIssue, known: str, later: str, package: str = "trl") -> list[tuple[str, Mapping[str, str]]]:
    versions = {package: [*map(Version, known.split())]}, {package: [*map(Version, later.split())]}
    found = cut_back(Catalog({one.id: one}), *versions)[one.id]
    return [(each.verdict.value, each.when) for each in found.predictions]


@pytest.mark.parametrize(
    ("wanted", "known", "later", "found"),
    [
        (">=1.0,<1.9", "1.0 1.8", "1.9 1.10", [">=1.0"]),  # nobody knew that it would be cured
        (">=1.0,<1.9", "1.0 1.8 1.9", "1.10", [">=1.0,<1.9"]),
        (">=1.9", "1.0 1.8", "1.9 1.10", []),  # nobody knew that it would begin
        ("<=1.8", "1.0 1.8", "1.9", [">=0"]),
        ("==1.8", "1.0 1.8", "1.9", [">=1.8"]),
        ("==1.9", "1.0 1.8", "1.9", []),
        ("==5.10.*", "5.9.0 5.10.2", "5.11.0", [">=5.10"]),
        ("==5.10.*", "5.9.0 5.10.2 5.11.0", "5.12.0", ["==5.10.*"]),
        (">=1.0,!=1.5", "1.0 1.4", "1.5 1.6", [">=1.0"]),  # an exception that was not out yet
        (">=1.0,!=1.5", "1.0 1.4 1.5", "1.6", [">=1.0,<1.5"]),  # and whether 1.6 is one nobody knew
        (">=1.0,!=1.5", "1.0 1.4 1.5 1.6", "1.7", [">=1.0,!=1.5"]),
        # A patch of an older series, which came after the next one.
        ("<5.10.4", "5.10.2 5.11.0", "5.10.4", ["<5.11.0"]),
        (">=5.10.4", "5.10.2 5.11.0", "5.10.4", [">=5.11.0"]),
        (">=0.14", "1.0", "1.9", [">=0.14"]),
        ("<2", "1.0", "", ["<2"]),  # nothing came later: nothing is cut
    ],
)
def test_a_bound_at_a_later_release_is_not_there(wanted: str, known: str, later: str, found: list[str]) -> None:
    assert cut(issue(("broken", {"trl": wanted})), known, later) == [("broken", {"trl": text}) for text in found]


def test_an_issue_that_begins_later_stays_and_predicts_nothing() -> None:
    one = issue(("ok", {"trl": ">=0.14,<1.9"}), ("silent", {"trl": ">=1.9"}))
    assert cut(one, "1.8", "1.9") == [("ok", {"trl": ">=0.14"})]
    assert cut(issue(("silent", {"trl": ">=1.9"})), "1.8", "1.9") == []


def test_a_range_that_falls_apart_gives_one_prediction_for_each_part() -> None:
    """A specifier set has no "or"."""
    one = issue(("broken", {"trl": ">=1.0,!=1.4.2", "peft": ">=0.1"}))
    assert cut(one, "1.0 1.4.1 1.4.2 1.5", "1.4.3") == [
        ("broken", {"trl": ">=1.0,<1.4.2", "peft": ">=0.1"}),
        ("broken", {"trl": ">=1.5", "peft": ">=0.1"}),
    ]


@cache
def releases() -> Mapping[str, tuple[tuple[Version, datetime.date], ...]]:
    listed = read_listing(ROOT / "fixtures" / "releases.toml").releases
    return {package: tuple((Version(each.version), each.day) for each in found) for package, found in listed.items()}


def known_and_later(day: datetime.date) -> tuple[dict[str, list[Version]], dict[str, list[Version]]]:
    known = {package: [version for version, out in found if out < day] for package, found in releases().items()}
    later = {package: [version for version, out in found if out >= day] for package, found in releases().items()}
    return known, later


def stacks(versions: Mapping[str, list[Version]]) -> list[dict[str, str]]:
    """Each release with the newest of the other packages."""
    newest = {package: str(found[-1]) for package, found in versions.items()}
    return [{**newest, package: str(each)} for package, found in versions.items() for each in found]


def answers(catalog: Catalog, versions: Mapping[str, str]) -> dict[tuple[str, str, str], Verdict | None]:
    """Under the strategies that the whole catalogue knows."""
    found = {}
    for name, one in known_issues.load().items():
        for subject in SUBJECTS:
            for strategy in one.labels():
                prediction = catalog[name].predict(subject, strategy, versions)
                found[name, subject, strategy] = prediction.verdict if prediction is not None else None
    return found


@pytest.mark.parametrize("day", DAYS, ids=str)
def test_of_what_was_out_the_catalogue_predicts_the_same(day: datetime.date) -> None:
    catalog = known_issues.load()
    known, later = known_and_later(day)
    past = cut_back(catalog, known, later)
    for versions in stacks(known):
        assert answers(past, versions) == answers(catalog, versions)


@pytest.mark.parametrize("day", DAYS, ids=str)
def test_nothing_is_predicted_from_the_future(day: datetime.date) -> None:
    """Of every later release as of the newest that was out: a catalogue of that day could say nothing else."""
    known, later = known_and_later(day)
    past = cut_back(known_issues.load(), known, later)
    newest = {package: found[-1] for package, found in known.items()}
    stack = {package: str(version) for package, version in newest.items()}
    expected = answers(past, stack)
    for package, found in later.items():
        for version in found:
            if version > newest[package]:
                assert answers(past, {**stack, package: str(version)}) == expected, (package, version)
