"""The table of faults is made from the markers of tests, and from nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import TESTS, Fault, FaultError, faults_in, read, table

FILE = Path("launch/test_x.py")
KILLED = '@pytest.mark.fault("A rank is killed.", "The launch names it.")\n'


def test_a_function_and_a_case_have_their_rows() -> None:
    case = 'pytest.param(1, marks=pytest.mark.fault("A disk | is full.", "The launch " "fails."))'
    source = f"{KILLED}def test_a():\n    pass\n@pytest.mark.parametrize('n', [2, {case}])\ndef test_b(n):\n    pass\n"
    found = faults_in(source, FILE)
    assert found == [
        Fault("A rank is killed.", "The launch names it.", "launch", "launch/test_x.py::test_a"),
        Fault("A disk | is full.", "The launch fails.", "launch", "launch/test_x.py::test_b"),
    ]
    assert table(found).splitlines() == [
        "## Launches",
        "",
        "| Fault | What happens | Test |",
        "| --- | --- | --- |",
        "| A rank is killed. | The launch names it. | `launch/test_x.py::test_a` |",
        "| A disk \\| is full. | The launch fails. | `launch/test_x.py::test_b` |",
    ]


@pytest.mark.parametrize(
    "marker",
    [
        '@pytest.mark.fault("A rank is killed.")',
        '@pytest.mark.fault("a rank is killed.", "The launch names it.")',
        '@pytest.mark.fault("A rank is killed.", "The launch names it")',
        '@pytest.mark.fault("A rank is killed.", NAMED)',
        '@pytest.mark.fault("A rank is killed.", outcome="The launch names it.")',
    ],
)
def test_two_sentences_are_required(marker: str) -> None:
    with pytest.raises(FaultError, match="^launch/test_x.py:1: the marker `fault` takes two sentences"):
        faults_in(f"{marker}\ndef test_a():\n    pass\n", FILE)


@pytest.mark.parametrize("where", [f"{KILLED}def helper():\n    pass\n", f"pytestmark = {KILLED[1:]}"])
def test_a_marker_without_a_test_is_refused(where: str) -> None:
    with pytest.raises(FaultError, match="^launch/test_x.py:1: the marker `fault` belongs to a test's decorators$"):
        faults_in(where, FILE)


def test_a_test_that_never_runs_shows_nothing() -> None:
    with pytest.raises(FaultError, match="^launch/test_x.py:3: test_a is always skipped, or expected to fail"):
        faults_in(f"{KILLED}@pytest.mark.skip\ndef test_a():\n    pass\n", FILE)


def test_a_fault_has_one_row(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    for name in ("test_a", "test_b"):
        (tmp_path / "launch" / f"{name}.py").write_text(f"{KILLED}def {name}():\n    pass\n")
    with pytest.raises(FaultError, match=r"^launch/test_b.py::test_b and launch/test_a.py::test_a have the same fault"):
        read(tmp_path)


def test_every_marker_of_these_tests_is_in_the_table() -> None:
    found = read()
    marked = {path for path in TESTS.rglob("test_*.py") if "pytest.mark.fault(" in path.read_text(encoding="utf-8")}
    assert {TESTS / fault.test.partition("::")[0] for fault in found} == marked - {Path(__file__).resolve()}
    assert len(found) >= 10
