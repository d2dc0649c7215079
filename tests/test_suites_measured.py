"""What suites say of many numbers: nothing is never right, and NaN is never small."""

from __future__ import annotations

import math

import pytest

from suites.measured import every, largest
from suites.ppo.runs import greatest_difference_of_logs
from suites.verdicts import unequal


def test_every_of_nothing_is_no_success() -> None:
    assert every([True, True])
    assert not every([True, False])
    with pytest.raises(AssertionError, match="nothing was measured"):
        every([])


def test_a_nan_is_the_largest_wherever_it_stands() -> None:
    assert largest([1.0, 3.0, 2.0]) == 3.0
    assert largest([1.0, math.nan]) == largest([math.nan, 1.0]) == math.inf
    with pytest.raises(AssertionError, match="nothing was measured"):
        largest([])


def test_two_empty_series_are_not_equal_but_nothing() -> None:
    with pytest.raises(AssertionError, match="nothing to compare"):
        unequal([], [])
    assert unequal([], [1.0])


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_finite_equals_nothing(number: float) -> None:
    assert unequal([1.0, number], [1.0, number])
    assert unequal([1.0, 2.0], [1.0, number], relative=True)
    assert not unequal([1.0, 2.0], [1.0, 2.0])


def test_a_number_that_one_log_lacks_is_infinitely_far() -> None:
    assert greatest_difference_of_logs([{"loss": 1.0, "kl": 0.5}], [{"loss": 1.25, "kl": 0.5}]) == 0.25
    assert greatest_difference_of_logs([{"loss": 1.0}], [{"loss": 1.0, "kl": 0.5}]) == math.inf
    assert greatest_difference_of_logs([{"loss": 1.0}, {"loss": math.nan}], [{"loss": 1.0}, {"loss": 1.0}]) == math.inf
