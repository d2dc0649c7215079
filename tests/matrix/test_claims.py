"""The groups of launches of a cell: their order, and that each is run by one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pytest_trlcompat.matrix.claims import ATTEMPTS, Group, GroupTable, ordered

from ..launch.processes import wait_until_gone

ROOT = Path(__file__).resolve().parents[2]

TAKE = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from pytest_trlcompat.matrix.claims import GroupTable
table = GroupTable(Path(sys.argv[1]))
groups = table.arrange(dict.fromkeys(map(str, range(200)), 1), [])
print("ready", flush=True)
sys.stdin.readline()
while (claim := table.claim(groups)) is not None:
    print(claim.group.name, flush=True)
    claim.done()
"""

DIE = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from pytest_trlcompat.matrix.claims import GroupTable
table = GroupTable(Path(sys.argv[1]))
claim = table.claim(table.arrange({{"a": 1}}, []))
print(claim, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def table(tmp_path: Path) -> GroupTable:
    table = GroupTable(tmp_path / "cell")
    table.plan({}, first_answer=False)
    return table


def test_the_longest_come_first_and_before_them_the_first_answers_the_shortest_first() -> None:
    groups = [Group("a", 1), Group("b", 9), Group("c", 5, True), Group("d", 2, True), Group("e", 9)]
    assert [group.name for group in ordered(groups, first_answer=False)] == ["b", "e", "c", "d", "a"]
    assert [group.name for group in ordered(groups, first_answer=True)] == ["d", "c", "b", "e", "a"]


def test_groups_that_have_not_run_are_estimated_by_their_tests(table: GroupTable) -> None:
    table.plan({"a": 10.0, "b": 30.0, "gone": 99.0}, first_answer=False)
    assert not table.groups
    groups = table.arrange({"a": 1, "b": 3, "c": 2}, ["c"])
    assert groups == [Group("b", 30.0), Group("c", 20.0, True), Group("a", 10.0)] == table.groups
    table.plan({}, first_answer=False)
    assert [group.seconds for group in table.arrange({"a": 1, "b": 3}, [])] == [3.0, 1.0]


def test_each_group_is_run_by_one_of_many_processes(table: GroupTable) -> None:
    command = [sys.executable, "-c", TAKE.format(root=str(ROOT)), str(table.folder)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for running in processes:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
    taken = Counter[str]()
    for running in processes:
        assert running.stdin is not None
        running.stdin.write("\n")
        running.stdin.flush()
    for running in processes:
        taken.update(running.communicate(timeout=120)[0].split())
        assert running.returncode == 0
    assert taken == Counter(map(str, range(200)))
    groups = table.groups or []
    assert table.seconds(groups).keys() == taken.keys()
    assert table.open(groups) == []


def test_a_group_whose_process_died_is_taken_again_but_not_for_ever(table: GroupTable) -> None:
    command = [sys.executable, "-c", DIE.format(root=str(ROOT)), str(table.folder)]
    for attempt in range(1, ATTEMPTS + 2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            printed = running.communicate(timeout=120)[0]
        assert running.returncode == -9
        wait_until_gone(running.pid)
        assert ("None" not in printed) == (attempt <= ATTEMPTS)
    groups = table.groups or []
    assert table.seconds(groups) == {}
    assert table.open(groups) == []


def test_a_plan_is_read_whole(table: GroupTable) -> None:
    table.arrange({"a": 1}, [])
    assert json.loads((table.folder / "groups.json").read_text()) == [["a", 1.0, False]]
    assert sorted(path.name for path in table.folder.iterdir()) == ["groups.json", "plan.json"]
