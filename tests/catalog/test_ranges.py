"""The module ``ranges``: held against ``packaging``, which answers the same for one version at a time."""

from __future__ import annotations

import itertools

import pytest
from packaging.specifiers import SpecifierSet

from pytest_trlcompat.catalog.ranges import ALL, Range, at, parse, pieces

TEXTS = (
    "",
    ">=0.15",
    ">0.15",
    "<0.15",
    "<=0.15",
    "==0.15",
    "!=0.15",
    "==0.15.*",
    "!=0.15.*",
    "~=0.15.1",
    "~=0.15",
    "===0.15",
    ">=0.15,<0.18",
    ">=0.15,!=0.16.1,<0.18",
    ">=4.48,!=4.49.*",
    ">=0.18,<0.16",
)
VERSIONS = (
    "0",
    "0.14.9",
    "0.15",
    "0.15.0.1",
    "0.15.1",
    "0.15.2",
    "0.16",
    "0.16.1",
    "0.17.3",
    "0.18",
    "4.48.3",
    "4.49",
    "5",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_range_holds_what_packaging_says_that_it_holds(text: str) -> None:
    specifiers, found = SpecifierSet(text), parse(text)
    for version in VERSIONS:
        assert found.covers(at(version)) is specifiers.contains(version), version


@pytest.mark.parametrize(("one", "other"), list(itertools.product(TEXTS, repeat=2)))
def test_both_and_either(one: str, other: str) -> None:
    both, either = parse(one) & parse(other), parse(one) | parse(other)
    assert either.covers(both)
    for version in map(at, VERSIONS):
        holds = parse(one).covers(version), parse(other).covers(version)
        assert both.covers(version) is all(holds)
        assert either.covers(version) is any(holds)


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("", "any version"),
        ("<0.18,>=0.15", ">=0.15,<0.18"),
        ("==4.48.*", ">=4.48,<4.49"),
        ("!=1.0", "<1.0 or >1.0"),
        ("<=1.2", "<=1.2"),
        (">1", ">1"),
        ("==1.0", "==1.0"),
        (">=2,<1", "no version"),
        (">=0", "any version"),
    ],
)
def test_a_range_is_described_as_a_person_writes_it(text: str, described: str) -> None:
    assert parse(text).describe() == described


def test_only_an_empty_range_is_false() -> None:
    assert not parse(">=0.18,<0.16")
    assert not parse(">0.18,<0.18")
    assert parse("==0.18")
    assert ALL


def test_one_version_is_told_from_a_range() -> None:
    assert str(parse("==0.15.2").version) == "0.15.2"
    assert parse(">=0.15").version is None
    assert ALL.version is None
    assert Range(()).version is None


def test_a_local_build_stands_where_its_release_stands() -> None:
    assert at("2.13.0+cpu") == at("2.13.0")


def test_a_pre_release_stands_anywhere_up_to_its_release() -> None:
    stand = at("0.18.0.dev0")
    assert not parse(">=0.18").covers(stand)
    assert not parse("<0.18").covers(stand)
    assert parse("<=0.18").covers(stand)
    assert parse(">=0.17").covers(stand)
    assert [piece.describe(stand) for piece in pieces(stand, [parse("<0.18")])] == ["<0.18", "==0.18"]


@pytest.mark.parametrize("text", ["before 1.0", ">=0.15 <0.18", "=1", ">=one"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="malformed version range .*; write it like '>=0.15,<0.18'"):
        parse(text)


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(ValueError, match="'main' is not a PEP 440 version"):
        at("main")


def test_pieces_are_cut_where_some_range_begins_or_ends() -> None:
    cut = pieces(parse(">=1,<4"), [parse(">=2,<5"), parse("==3"), parse("<1")])
    assert [piece.describe() for piece in cut] == [">=1,<2", ">=2,<3", "==3", ">3,<4"]
    assert cut[1].from_here() == ">=2"
    assert pieces(ALL, []) == [ALL]
