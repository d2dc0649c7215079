"""The module ``ranges``: held against ``packaging``, which answers the same for one version at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from packaging.specifiers import SpecifierSet

from pytest_trlcompat.catalog.ranges import ABSENT, ALL, Range, at, both, either, parse, pieces
from tests.counting import calls

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


def test_a_dev_release_of_a_post_release_stands_behind_the_release() -> None:
    stand = at("0.16.5.post1.dev3")
    assert stand
    assert parse(">0.16.5").covers(stand)
    assert parse(">=0.16,<0.17").covers(stand)
    assert parse("<=0.16.5.post1").covers(stand)
    assert not parse(">=0.16.5.post1").covers(stand)


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


# A package that may not be installed


def test_no_version_range_holds_that_a_package_is_not_installed() -> None:
    assert not ALL.meets(ABSENT)
    assert not parse("!=1").meets(ABSENT)
    assert not parse("").covers(ABSENT)
    maybe = parse("==1.0") | ABSENT
    assert maybe.version is None
    assert maybe.describe() == "==1.0 or not installed"
    assert (ABSENT | ALL).describe() == "any version or not installed"
    assert ABSENT.describe() == "not installed"
    assert [piece.describe() for piece in pieces(maybe, [parse(">=0.5"), ALL])] == ["not installed", "==1.0"]


# As sets


def _some_range(generator: random.Random) -> Range:
    operators, versions = (">=", "<=", ">", "<", "!=", "=="), range(12)
    texts = [
        generator.choice(operators) + str(generator.choice(versions)) for _ in range(generator.choice((0, 1, 2, 8)))
    ]
    points = (parse(f"=={generator.choice(versions)}") for _ in range(generator.choice((0, 0, 2, 6))))
    return either([parse(",".join(texts)), *points, *([ABSENT] if generator.random() < 0.2 else [])])


POINTS = [parse(f"=={text}") for text in ("0.dev0", *map(str, range(12)), *(f"{number}.5" for number in range(12)))]


def _points(of: Range) -> set[int]:
    return {
        number
        for number, point in enumerate([*POINTS, ABSENT])
        if any(low <= point.intervals[0][0] and point.intervals[0][1] <= high for low, high in of.intervals)
    }


@pytest.mark.parametrize("seed", range(20))
def test_ranges_are_sets(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(50):
        one, other = _some_range(generator), _some_range(generator)
        here, there = _points(one), _points(other)
        assert _points(one & other) == here & there
        assert _points(one | other) == here | there
        assert _points(one - other) == here - there
        assert _points(both((one, other))) == here & there
        assert one.covers(other) is (there <= here)
        assert one.meets(other) is bool(here & there)
        cut = pieces(one, [other])
        assert _points(either(cut)) == here
        assert all(not here_and_there or _points(each) == here_and_there for each in cut
                   for here_and_there in [_points(each) & there])  # fmt: skip


# What they cost


def _exclusions(number: int) -> str:
    return ",".join(f"!=0.{minor}.{micro}" for minor in range(number // 10) for micro in range(10))


@pytest.mark.parametrize(
    "cost",
    [
        lambda n: calls(lambda: parse(_exclusions(n))),
        lambda n: _cost_of(n, lambda one, other: one & other),
        lambda n: _cost_of(n, lambda one, other: one | other),
        lambda n: _cost_of(n, lambda one, other: one.covers(other)),
        lambda n: _cost_of(n, lambda one, other: pieces(one, [other])),
        lambda n: _cost_of_all([parse(f"!=1.{number}") for number in range(n)]),
    ],
    ids=["parse", "and", "or", "covers", "pieces", "both"],
)
def test_twice_the_specifiers_cost_twice_the_time(cost: Callable[[int], int]) -> None:
    cost(10)  # what is done once
    assert cost(800) / cost(400) < 2.6  # n log n; n squared makes it 4


def _cost_of(number: int, function: Callable[[Range, Range], object]) -> int:
    one, other = parse(_exclusions(number)), parse(_exclusions(number) + ",!=0.0.0.1")
    return calls(lambda: function(one, other))


def _cost_of_all(ranges: list[Range]) -> int:
    return calls(lambda: both(ranges))


def test_one_range_is_looked_up_in_many() -> None:
    many, few = parse(_exclusions(800)), parse(">=0.15,<0.18")
    for ask in (many.covers, many.meets, lambda other: other.covers(many), lambda other: other.meets(many)):
        assert calls(lambda ask=ask: ask(few)) < 100  # type: ignore[misc]
