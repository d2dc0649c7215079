"""Delta debugging, held against brute force, and the difference of two locks."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_trlcompat.bisect.attribution import Changes, changes, ddmin
from pytest_trlcompat.bisect.search import Answer

NAMES = "abcdefgh"


@given(
    st.integers(1, 8).flatmap(
        lambda count: st.tuples(
            st.just(NAMES[:count]),
            st.lists(st.sets(st.sampled_from(NAMES[:count]), min_size=1), min_size=1, max_size=3),
            st.lists(st.tuples(st.sampled_from(NAMES[:count]), st.sampled_from(NAMES[:count])), max_size=3),
        )
    )
)
@settings(deadline=None)
def test_nothing_can_be_left_out_of_what_it_finds(drawn: tuple[str, list[set[str]], list[tuple[str, str]]]) -> None:
    """Any of the ``causes`` turns the answer; a set with one of a pair that needs the other cannot be resolved."""
    names, causes, needs = drawn
    asked: list[frozenset[str]] = []

    def truth(chosen: frozenset[str]) -> Answer:
        if any(one in chosen and other not in chosen for one, other in needs):
            return Answer.UNKNOWN
        return Answer.BAD if any(cause <= chosen for cause in causes) else Answer.GOOD

    def ask(chosen: frozenset[str]) -> Answer:
        asked.append(chosen)
        return truth(chosen)

    smallest = ddmin(names, ask, Answer.BAD)
    assert truth(frozenset(smallest)) is Answer.BAD
    for left_out in smallest:
        rest = frozenset(smallest) - {left_out}
        assert not rest or truth(rest) is not Answer.BAD
    assert len(asked) == len(set(asked)), "a set was asked twice"
    assert frozenset() not in asked
    assert frozenset(names) not in asked


def test_one_of_many_is_found_in_few_questions() -> None:
    names = [f"p{number}" for number in range(32)]
    asked: list[frozenset[str]] = []

    def ask(chosen: frozenset[str]) -> Answer:
        asked.append(chosen)
        return Answer.BAD if "p21" in chosen else Answer.GOOD

    assert ddmin(names, ask, Answer.BAD) == ("p21",)
    assert len(asked) <= 10


def test_two_that_are_needed_together_are_both_found() -> None:
    for pair in combinations(NAMES, 2):
        wanted = frozenset(pair)
        found = ddmin(NAMES, lambda chosen, wanted=wanted: Answer.GOOD if wanted <= chosen else Answer.BAD, Answer.GOOD)  # type: ignore[misc]
        assert frozenset(found) == wanted


def test_the_difference_of_two_locks() -> None:
    before = {"trl": "0.14.0", "transformers": "4.51.3", "old": "1"}
    after = {"trl": "0.14.0", "transformers": "4.52.1", "new": "2"}
    assert changes(before, after) == Changes({"transformers": ("4.51.3", "4.52.1")}, {"old": "1"}, {"new": "2"})
    assert not changes(before, before)
