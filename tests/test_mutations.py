"""The faults of ``nox -s mutations``: that each can still be planted, without planting any."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import known_issues

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mutations import Mutation, read_mutations  # type: ignore[import-not-found]  # noqa: E402 - needs the line above

MUTATIONS = read_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{one.cure}-{one.issue or Path(one.tests).stem}")
def test_a_fault_can_be_planted(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    assert (mutation.issue in known_issues.load()) != (
        bool(mutation.tests) and (ROOT / mutation.tests.partition("::")[0]).is_file()
    )


def test_every_cure_has_a_fault() -> None:
    trainers = ROOT / "pytest_trlcompat" / "trainers"
    cures = {path.stem for path in trainers.glob("*.py") if "Mixin(" in path.read_text()}
    assert cures - {one.cure for one in MUTATIONS} == set()


def test_results_are_read_by_test(tmp_path: Path) -> None:
    from planting import outcomes_of_report  # type: ignore[import-not-found]

    report = tmp_path / "report.xml"
    assert outcomes_of_report(report) == {}
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase name="a"/><testcase name="b"><failure>E</failure></testcase>'
        '<testcase name="c"><skipped/></testcase><testcase name="d"><error>E</error></testcase>'
        "</testsuite></testsuites>"
    )
    assert outcomes_of_report(report) == {"a": "ok", "b": "failed", "c": "absent", "d": "failed"}
