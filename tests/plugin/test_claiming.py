"""Several processes of pytest run the tests of one folder: each test once, each group in one of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pytest_trlcompat.matrix.claims import GroupTable

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import os, pathlib, time
import pytest

@pytest.fixture(scope="module")
def module_wide():
    yield os.getpid()
    print("torn down")

def group(number):
    return pytest.mark.launch_group(f"group {number % 5}")

@pytest.mark.parametrize("number", [pytest.param(number, marks=group(number)) for number in range(20)])
def test_many(number, module_wide):
    assert module_wide == os.getpid()
    time.sleep(0.01)
    with open(pathlib.Path(__file__).parent / "ran", "a") as file:
        print(os.getpid(), __name__, number, file=file)
"""


def command(folder: Path, table: GroupTable, *arguments: str) -> list[str]:
    plugins = ("-p", "trlcompat", "-p", "pytest_trlcompat.plugin.claiming", "-p", "no:cacheprovider")
    return [sys.executable, "-m", "pytest", *plugins, "--trlcompat-claims", str(table.folder), *arguments, str(folder)]


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**inherited, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def table(tmp_path: Path) -> GroupTable:
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / "tests" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "tests" / name).write_text(TESTS)
    table = GroupTable(tmp_path / "claims")
    table.plan({}, first_answer=True)
    return table


def test_each_test_runs_once_and_each_group_in_one_process(tmp_path: Path, table: GroupTable) -> None:
    processes = [
        subprocess.Popen(
            command(tmp_path / "tests", table), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    printed = [running.communicate(timeout=300)[0] for running in processes]
    assert [running.returncode for running in processes] == [0, 0], printed
    ran = [line.split() for line in (tmp_path / "tests" / "ran").read_text().splitlines()]
    assert Counter((name, number) for _, name, number in ran) == Counter(
        (name, str(number)) for name in ("test_one", "test_two") for number in range(20)
    )
    processes_of_group: dict[int, set[str]] = {}
    for pid, _, number in ran:
        processes_of_group.setdefault(int(number) % 5, set()).add(pid)
    assert {len(pids) for pids in processes_of_group.values()} == {1}
    assert sum(int(number) for text in printed for number in re.findall(r"(\d+) passed", text)) == 40
    groups = table.groups or []
    assert {group.name for group in groups} == {f"group {number}" for number in range(5)} == set(table.seconds(groups))


def test_a_test_that_fails_fails_its_process_alone_and_its_group_is_done(tmp_path: Path, table: GroupTable) -> None:
    (tmp_path / "tests" / "test_two.py").write_text("def test_fails(): assert 0\ndef test_passes(): pass\n")
    done = subprocess.run(
        command(tmp_path / "tests", table), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "1 failed, 21 passed" in done.stdout
    assert "tests/test_two.py" in table.seconds(table.groups or [])
    again = subprocess.run(
        command(tmp_path / "tests", table), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert (again.returncode, "no tests ran" in again.stdout) == (0, True)  # all have run


def test_groups_with_the_worst_known_issues_are_the_first_answer(tmp_path: Path, table: GroupTable) -> None:
    (tmp_path / "tests" / "test_two.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('subject', ['upstream'])\n"
        "@pytest.mark.known_issue('grpo-bf16-logprobs')\n"
        "@pytest.mark.launch_group('serious')\n"
        "def test_it(subject): pass\n"
        "@pytest.mark.known_issue('conformance-grpo')\n"
        "@pytest.mark.launch_group('a search')\n"
        "def test_other(): pass\n"
        "@pytest.mark.known_issue('grpo-train-sampler')\n"
        "@pytest.mark.launch_group('a crash')\n"
        "def test_third(): pass\n"
    )
    done = subprocess.run(command(tmp_path / "tests", table), cwd=tmp_path, env=environment(), check=False)
    assert done.returncode == 0
    groups = table.groups or []
    assert [group.name for group in groups if group.is_first_answer] == ["serious"]
    assert groups[0].name == "serious"


def test_a_stopped_run_leaves_its_group_to_others(tmp_path: Path, table: GroupTable) -> None:
    (tmp_path / "tests" / "test_two.py").write_text("import pytest\ndef test_ends(): pytest.exit('enough', 3)\n")
    (tmp_path / "tests" / "test_one.py").unlink()
    done = subprocess.run(command(tmp_path / "tests", table), cwd=tmp_path, env=environment(), check=False)
    assert done.returncode == 3
    groups = table.groups or []
    assert (table.seconds(groups), table.open(groups)) == ({}, [])


def test_the_first_failure_ends_a_run_that_is_to_end_with_it(tmp_path: Path, table: GroupTable) -> None:
    (tmp_path / "tests" / "test_one.py").write_text("def test_fails(): assert 0\ndef test_passes(): pass\n")
    (tmp_path / "tests" / "test_two.py").unlink()
    done = subprocess.run(
        command(tmp_path / "tests", table, "-x"),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "1 failed in" in done.stdout) == (1, True), done.stdout
    assert table.seconds(table.groups or []) == {}
