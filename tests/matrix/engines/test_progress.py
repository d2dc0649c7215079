"""Rate and time left of a sweep."""

from __future__ import annotations

from pytest_trlcompat.matrix.engines.progress import Progress


def test_time_left_follows_from_what_cells_took_before() -> None:
    progress = Progress(["a", "b", "c", "d"], {"a": 300, "b": 100, "c": 100, "e": 5000}, now=1000)
    # a is three fifths of what is left, since d is taken for the median of those known, 100 s.
    assert progress.ended("a", 1060) == "[1/4] 1.0 cells a minute, about 60 s left"
    assert progress.ended("b", 1080) == "[2/4] 1.5 cells a minute, about 40 s left"
    assert progress.ended("c", 1100) == "[3/4] 1.8 cells a minute, about 20 s left"
    assert progress.ended("d", 1120) == "[4/4] 2.0 cells a minute"


def test_long_times_are_minutes_and_hours() -> None:
    assert Progress(["a", "b"], {}, 0).ended("a", 91 * 60) == "[1/2] 0.0 cells a minute, about 1.5 h left"
    assert Progress(["a", "b"], {}, 0).ended("a", 20 * 60) == "[1/2] 0.1 cells a minute, about 20 min left"


def test_a_cell_that_ends_at_once_is_no_division_by_zero() -> None:
    assert Progress(["a"], {"a": 0.0}, 5).ended("a", 5).startswith("[1/1] ")
    assert "about 0 s left" in Progress(["a", "b"], {"a": 0.0, "b": 0.0}, 5).ended("a", 5)


def test_cells_that_run_count_by_the_share_of_them_that_is_done() -> None:
    progress = Progress(["a", "b", "c"], {"a": 60.0, "b": 20.0, "c": 20.0}, now=0.0)
    assert progress.so_far({}, now=5.0) == "[0/3] "
    assert progress.so_far({"a": 0.01, "b": 0.02}, now=10.0) == "[0/3] a 1%, b 2%"  # too early for an estimate
    assert progress.so_far({"a": 0.5, "b": 1.0}, now=100.0) == "[0/3] a 50%, b 100%, about 2 min left"
    progress.ended("b", now=100.0)
    assert progress.so_far({"a": 0.5}, now=100.0) == "[1/3] a 50%, about 2 min left"
    assert progress.so_far({"a": 1.0, "c": 0.5}, now=90.0) == "[1/3] a 100%, c 50%, about 10 s left"
