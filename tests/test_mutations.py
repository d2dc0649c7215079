"""The faults of ``nox -s mutations``: that each can still be planted, without planting any."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.trainers.curing.names import MODULES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mutations import FAULTS, Mutation, leaving_out, read_mutations  # type: ignore[import-not-found]  # noqa: E402 - needs the line above

MUTATIONS = read_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{one.cure}-{one.issue or Path(one.tests).stem}")
def test_a_fault_can_be_planted(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    assert (mutation.issue in known_issues.load()) != (
        bool(mutation.tests) and (ROOT / mutation.tests.partition("::")[0]).is_file()
    )


def test_every_cure_has_a_fault_that_is_written_or_that_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cures = {module.rpartition(".")[2] for name, module in MODULES.items() if name.endswith("Mixin")}
    assert len(cures) > 60
    assert cures - {one.cure for one in MUTATIONS} == set()
    # Of cures whose topic has no file, as of a new one.
    for path in FAULTS.glob("*.toml"):
        if path.stem != "generation":
            (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr("mutations.FAULTS", tmp_path)
    derived = {one.why: one.issue for one in read_mutations() if one.why.endswith("Mixin out")}
    assert derived.items() >= {
        ("leaves AssistantPrefixMixin out", "grpo-assistant-prefix"),
        ("leaves CheckpointedGenerationMixin out", "grpo-checkpointed-generation"),
        ("leaves SamplingMixin out", "grpo-sampling"),
    }


def test_the_fault_that_leaves_a_cure_out_is_looked_for_in_the_newest_cell_that_needs_it() -> None:
    fault = leaving_out("ShiftedCountMixin")
    assert fault == Mutation(
        file="pytest_trlcompat/trainers/curing/compose.py",
        old="if mixin not in {*left_out, *have}",
        new='if mixin not in {*left_out, *have, "ShiftedCountMixin"}',
        cell="trl=1.16.0 transformers=5.23.0",
        why="leaves ShiftedCountMixin out",
        issue="sft-shifted-count",
        cure="shifted_count",
    )
    test_a_fault_can_be_planted(fault)
    with pytest.raises(MatrixError, match="OneDevicePerRankMixin: no published cell shows that it is needed; write a"):
        leaving_out("OneDevicePerRankMixin")  # cures no entry of the catalogue


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
