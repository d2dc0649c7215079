"""Delta debugging, compared with brute force, and the difference of two locks."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_trlcompat.bisect.attribution import LockChanges, ddmin, lock_changes
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
def test_ddmin_finds_a_set_from_which_nothing_can_be_left_out(
    drawn: tuple[str, list[set[str]], list[tuple[str, str]]],
) -> None:
    """Any of the ``causes`` changes the answer; a set with a package but without one that it needs is inconclusive."""
    names, causes, needs = drawn
    tested: list[frozenset[str]] = []

    def truth(chosen: frozenset[str]) -> Answer:
        if any(one in chosen and other not in chosen for one, other in needs):
            return Answer.INCONCLUSIVE
        return Answer.BAD if any(cause <= chosen for cause in causes) else Answer.GOOD

    def run(chosen: frozenset[str]) -> Answer:
        tested.append(chosen)
        return truth(chosen)

    smallest = ddmin(names, run, Answer.BAD)
    assert truth(frozenset(smallest)) is Answer.BAD
    for left_out in smallest:
        rest = frozenset(smallest) - {left_out}
        assert not rest or truth(rest) is not Answer.BAD
    assert len(tested) == len(set(tested)), "a set was tested twice"
    assert frozenset() not in tested
    assert frozenset(names) not in tested


def test_ddmin_finds_one_of_many_in_few_tests() -> None:
    names = [f"p{number}" for number in range(32)]
    tested: list[frozenset[str]] = []

    def run(chosen: frozenset[str]) -> Answer:
        tested.append(chosen)
        return Answer.BAD if "p21" in chosen else Answer.GOOD

    assert ddmin(names, run, Answer.BAD) == ("p21",)
    assert len(tested) <= 10


def test_ddmin_finds_two_that_are_needed_together() -> None:
    for pair in combinations(NAMES, 2):
        wanted = frozenset(pair)
        found = ddmin(NAMES, lambda chosen, wanted=wanted: Answer.GOOD if wanted <= chosen else Answer.BAD, Answer.GOOD)  # type: ignore[misc]
        assert frozenset(found) == wanted


def test_the_difference_of_two_locks() -> None:
    before = {"trl": "0.14.0", "transformers": "4.51.3", "old": "1"}
    after = {"trl": "0.14.0", "transformers": "4.52.1", "new": "2"}
    assert lock_changes(before, after) == LockChanges(
        {"transformers": ("4.51.3", "4.52.1")}, {"old": "1"}, {"new": "2"}
    )
    assert not lock_changes(before, before)
