"""How many processes measure at a time, over the sessions of one command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.matrix.engines import places as places_module
from pytest_trlcompat.matrix.engines.places import VARIABLE, Places, requested_limit, share_limit

from .beside import PROJECT, machine

HOLD = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from pytest_trlcompat.matrix.engines.places import Places
place = Places(Path(sys.argv[1]), 2).take()
print(place is not None, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ("-s matrix", None),
        ("-s matrix --parallel 2", 2),
        ("-s matrix --parallel=3 -- --parallel 7", 3),
        ("-s matrix -j 4", 4),
        ("-j5 -s matrix", 5),
        ("-s matrix -- --fresh", None),
        ("-s matrix --parallel 0", None),  # which nox refuses
    ],
)
def test_what_parallel_says(words: str, limit: int | None) -> None:
    assert requested_limit(words.split(), {}) == limit
    assert requested_limit(words.split(), {"NOX_PARALLEL": "9"}) == (limit or (None if "0" in words else 9))


def test_auto_is_what_nox_takes_it_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert requested_limit(["--parallel", "auto"], {}) == 12


def test_the_sessions_that_nox_starts_know_what_was_said_to_the_outermost(tmp_path: Path) -> None:
    environ = {VARIABLE: "of a command around this one"}
    share_limit(["-s", "matrix", "--parallel", "3"], outermost=True, environ=environ)
    share_limit(["-s", "matrix(a)", "--parallel", "1"], outermost=False, environ=environ)
    assert environ == {VARIABLE: "3"}
    assert Places.of_command(tmp_path, environ).limit == 3
    share_limit(["-s", "matrix"], outermost=True, environ=environ)
    assert environ == {}
    assert Places.of_command(tmp_path, environ).limit is None


Make = Callable[..., Places]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Places of one command; each call is another session."""
    sessions: list[Places] = []

    def session(limit: int | None = None, **described: Any) -> Places:
        sessions.append(Places(tmp_path / "places", limit, machine=machine(**described)))
        return sessions[-1]

    yield session
    for places in sessions:
        places.remove()


def many(places: Places) -> int:
    """Places that are taken until there is none."""
    count = 0
    while places.take() is not None:
        count += 1
    return count


def far_apart(places: Places) -> Places:
    """As if each place had been taken long ago, so that all processes have what memory they need."""
    for place in places._taken:
        place.since -= 3600
    return places


@pytest.mark.parametrize(
    ("limit", "described", "expected"),
    [
        (None, {"cores": 4.0}, 4),
        (None, {"cores": 4.0, "others": 1.4}, 3),
        (None, {"cores": 4.0, "others": 1.6}, 2),
        (None, {"cores": 4.0, "others": 4.0}, 1),
        (None, {"cores": 0.5}, 1),
        (None, {"cores": 2.5}, 3),
        (2, {"cores": 16.0}, 2),
        (2, {"cores": 2.0, "others": 2.0}, 1),
        (None, {"cores": 4.0, "memory": places_module.MEMORY}, 1),
        (None, {"cores": 4.0, "memory": 2 * places_module.MEMORY}, 2),
    ],
)
def test_places_are_as_many_as_cores_memory_and_the_limit_allow(
    make: Make, limit: int | None, described: dict[str, Any], expected: int
) -> None:
    assert many(make(limit, **described)) == expected


def test_a_process_that_has_its_memory_is_not_counted_twice(make: Make) -> None:
    places = make(cores=8.0, memory=places_module.MEMORY)
    assert [many(places), many(far_apart(places)), many(far_apart(places))] == [1, 1, 1]


def test_a_place_that_is_given_back_is_there_again(make: Make) -> None:
    places = make(1, cores=8.0)
    first = places.take()
    assert first is not None
    assert places.take() is None
    first.give_back()
    assert places.take() is not None
    places.remove()
    assert not places.folder.exists()


@pytest.mark.fault(
    "Two sessions of `nox --parallel 2` could each start a process for every core.",
    "They share two places: one that has both, or one that is killed, leaves the other what it had.",
)
def test_sessions_share_the_places_of_their_command_and_a_killed_one_leaves_its_own(tmp_path: Path, make: Make) -> None:
    command = [sys.executable, "-c", HOLD.format(root=str(PROJECT)), str(tmp_path / "places")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        ours = make(2, cores=8.0)
        assert many(ours) == 1
        other.kill()
        other.wait()
        assert many(ours) == 1
