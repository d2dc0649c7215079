"""This project's own workflows: their shell steps are run in a copy of the checkout, from the parts to the report.

Without a package index and with an empty cache no environment can be built, and every cell is `untestable`. So the
whole way is taken, from the division into parts over nox to the merged report, its page and its annotations, in little
time and to a known end. What the suites find is no matter of these files. Two cells are left, in two parts.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.matrix.results import UNTESTABLE, read_sidecar
from tests.copies import copy_with_bytecode

from .steps import Runner, StepFailed, read

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="the workflows set up Python 3.11, for which .ci/nox.txt is, and 3.10 cannot have it",
)

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ROOT / ".github" / "workflows" / "sweep.yml"
PIPELINE = ROOT / ".gitlab-ci.yml"
PARTS = 2


@pytest.fixture
def copy(tmp_path: Path, home: Path, variables: dict[str, str]) -> Runner:
    """A copy of the checkout, with one cell of the full selection and one of the covering arrays."""
    project = tmp_path / "project"
    for name in ("pytest_trlcompat", "fixtures", "suites", ".ci"):
        copy_with_bytecode(ROOT / name, project / name)
    for name in ("hatch_build.py", "noxfile.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    matrix, pairwise = (project / "fixtures" / f"{name}.toml" for name in ("matrix", "pairwise"))
    head, first, *_ = matrix.read_text().split("[[cell]]\n")
    matrix.write_text(f"{head}[[cell]]\n{first}")
    lines = pairwise.read_text().splitlines(keepends=True)
    rows = [number for number, line in enumerate(lines) if re.match(r" +\[", line)]
    pairwise.write_text("".join(line for number, line in enumerate(lines) if number not in rows[1:]))
    cells = read_matrix(matrix)
    assert [len(cells.full()), len(cells.pairwise(1))] == [1, 1]
    return Runner(project, home, variables)


def without_index(machine: Runner, tmp_path: Path) -> Runner:
    """The same machine, on which nothing can be fetched, and nothing was."""
    nothing = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "empty")}
    return Runner(machine.folder, machine.home, {**machine.variables, **nothing})


def swept(part: Path) -> list[str]:
    sidecars = [read_sidecar(path) for path in part.glob("*.cell.json")]
    assert {sidecar.state for sidecar in sidecars} == {UNTESTABLE}
    return [sidecar.id for sidecar in sidecars]


def check_report(machine: Runner, page: str) -> None:
    """Of two cells, none of which could be built."""
    assert page.startswith("## 2 cells, 0 verdicts, torch 2.13.0; 2 cells not finished\n\n### Not finished\n")
    assert page.count("is untestable: ") == PARTS
    compat = machine.folder / "build" / "compat"
    assert {f"compat.{kind}" for kind in ("json", "md", "html", "xml")} <= {path.name for path in compat.iterdir()}


def test_the_weekly_sweep_on_github(copy: Runner, tmp_path: Path) -> None:
    workflow = read(SWEEP.read_text())
    machine, cells = without_index(copy, tmp_path), []
    for number in range(1, PARTS + 1):
        context = {"matrix.shard": str(number), "strategy.job-total": str(PARTS)}
        with pytest.raises(StepFailed, match="untestable") as failed:
            machine.github(workflow, "shard", context)
        ran = failed.value.args[-1]
        assert f"nox -s matrix -- --full --pairwise --shard {number}/{PARTS}" in ran.scripts
        part = tmp_path / "parts" / f"shard-{number}"
        shutil.move(machine.folder / "build" / "compat", part)  # as uploading and downloading artifacts do
        cells += swept(part)
    assert len(set(cells)) == len(cells) == PARTS
    shutil.move(tmp_path / "parts", copy.folder)
    with pytest.raises(StepFailed, match="-eq 16") as failed:
        copy.github(workflow, "report", {})  # two parts are not sixteen
    ran = failed.value.args[-1]
    check_report(copy, ran.summary)
    assert ran.output.count("\n::warning title=trl") == PARTS
    assert "merged: 2 cells" in ran.output


def test_the_weekly_sweep_on_gitlab(copy: Runner, tmp_path: Path) -> None:
    pipeline = read(PIPELINE.read_text())
    machine, cells = without_index(copy, tmp_path), []
    del pipeline["variables"]["UV_CACHE_DIR"]
    for number in range(1, PARTS + 1):
        variables = {"CI_NODE_INDEX": str(number), "CI_NODE_TOTAL": str(PARTS), "CI_JOB_NAME_SLUG": "shard"}
        with pytest.raises(StepFailed, match="untestable"):
            machine.gitlab(pipeline, "shard", variables)
        cells += swept(copy.folder / "parts" / f"shard-{number}")
    assert len(set(cells)) == len(cells) == PARTS
    with pytest.raises(StepFailed, match="-eq 16"):
        copy.gitlab(pipeline, "report", {})
    check_report(copy, (copy.folder / "summary.md").read_text())


def test_as_many_parts_are_expected_as_there_are() -> None:
    workflow, pipeline = read(SWEEP.read_text()), read(PIPELINE.read_text())
    shards = workflow["jobs"]["shard"]["strategy"]["matrix"]["shard"]
    assert shards == list(range(1, len(shards) + 1))
    assert pipeline["shard"]["parallel"] == len(shards)
    expected = f'test "$(ls parts | wc -l)" -eq {len(shards)}'
    assert expected in workflow["jobs"]["report"]["steps"][-1]["run"]
    assert expected in pipeline["report"]["script"]
