"""What the sessions of nox do for Ray: one session for all cells, and what fails it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.matrix import process, sessions
from pytest_trlcompat.matrix.engines import session as session_module
from pytest_trlcompat.matrix.engines.request import Request
from pytest_trlcompat.matrix.engines.session import WHOLE, ray_requirements
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.results import Sidecar
from pytest_trlcompat.matrix.sessions import Project
from pytest_trlcompat.matrix.suite_choice import chosen_tests
from pytest_trlcompat.matrix.sweep import Sweep
from tests.matrix.made_up import OK, SURPRISE

from .made_up_node import CELLS, ROOT


class Stage:
    """The project's own matrix in another folder; the driver's process writes what it is told."""

    def __init__(self, folder: Path) -> None:
        for name in ("fixtures", "suites", "pytest_trlcompat"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
        self.folder = folder
        self.project = Project(folder, lambda text: None)
        self.requests: list[Request] = []
        self.tools: list[tuple[tuple[str, ...], str | None]] = []
        self.wrong: tuple[str, ...] = ()
        self.missing: tuple[str, ...] = ()
        self.status = 0

    def run(self, command: list[str], *, env: Mapping[str, str], cwd: Path, grace: float) -> int:
        assert command[1:3] == ["-m", "pytest_trlcompat.matrix.engines"]
        assert grace >= 10
        request = Request.from_json(Path(command[3]).read_text())
        self.requests.append(request)
        results = Layout(self.folder).results
        results.mkdir(parents=True, exist_ok=True)
        for cell in request.cells:
            if cell.id not in self.missing:
                record = SURPRISE if cell.id in self.wrong else OK
                (results / f"{cell.id}.jsonl").write_text(record.to_json() + "\n")
                (results / f"{cell.id}.cell.json").write_text(
                    Sidecar(cell.id, dict(cell.pins), "tested", request.sweep).to_json()
                )
        return self.status

    def make_tools(self, name: str, requirements: list[str], **how: Any) -> Environment:
        assert (name, how["project"]) == ("ray", True)
        self.tools.append((tuple(requirements), how["python"]))
        return Environment(self.folder / "tools")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(sessions.atexit, "register", lambda function: None)  # type: ignore[attr-defined]
    monkeypatch.setenv(Sweep.VARIABLE, "restored after the test")
    monkeypatch.delenv(Sweep.VARIABLE)
    stage = Stage(tmp_path)
    monkeypatch.setattr(process, "run", stage.run)
    monkeypatch.setattr(stage.project.ray, "_tools", stage.make_tools)
    return stage


def test_one_session_runs_all_chosen_cells(stage: Stage) -> None:
    words = ["--engine", "ray", "--issue", "grpo-train-sampler", "--ray-python", "3.12"]
    assert stage.project.cells(["-s", "matrix", "--", *words]) == ["ray"]
    stage.project.matrix_cell("ray", [*words, "--ray-version", "2.58.1"])
    (request,) = stage.requests
    assert [cell.id for cell in request.cells] == [cell.id for cell in stage.project.matrix.default()]
    assert (request.issues, request.fresh, request.pytest_arguments) == (("grpo-train-sampler",), False, ())
    assert request.sweep == stage.project.sweep.name
    assert [line.split(">")[0] for line in request.requirements] == ["packaging", "tomli", "uv"]
    ((requirements, python),) = stage.tools
    assert requirements[0] == "ray[client,default]==2.58.1"
    assert python == "3.12"


@pytest.mark.parametrize("words", ["--full", "--shard 1/3", "--torch dated", "--pairwise", "--full --shard 2/7"])
def test_it_takes_the_selections_of_nox_alone(stage: Stage, words: str) -> None:
    alone = stage.project.cells(["-s", "matrix", "--", *words.split()])
    stage.project.cells(["-s", "matrix", "--", "--engine", "ray", *words.split()])
    stage.project.matrix_cell("ray", ["--engine", "ray", *words.split()])
    assert [cell.id for cell in stage.requests[0].cells] == alone
    request = stage.requests[0]
    default = stage.project.matrix.default()
    full = "--full" in words
    assert request.tests == {cell.id: chosen_tests(cell, default, full=full) for cell in request.cells}
    assert request.pytest_arguments == ()


def test_cells_that_the_command_names_run_together_and_fail_each_its_own_session(stage: Stage) -> None:
    words = ["--engine", "ray"]
    named = [f"matrix({cell_id})" for cell_id in CELLS[:2]]
    assert stage.project.cells(["-s", *named, "--", *words]) == ["ray", *CELLS[:2]]
    stage.wrong = (CELLS[1],)
    stage.project.matrix_cell(CELLS[0], words)
    with pytest.raises(MatrixError, match=f"{CELLS[1]}: 1 of 1 verdicts are not as predicted"):
        stage.project.matrix_cell(CELLS[1], words)
    (request,) = stage.requests
    assert [cell.id for cell in request.cells] == [*CELLS[:2]]


def test_the_session_of_all_names_what_is_wrong(stage: Stage) -> None:
    stage.wrong, stage.missing = (CELLS[1],), (CELLS[2],)
    stage.project.cells(["-s", "matrix", "--", "--engine", "ray"])
    with pytest.raises(MatrixError) as caught:
        stage.project.matrix_cell("ray", ["--engine", "ray"])
    assert str(caught.value).splitlines() == [
        f"{CELLS[2]} was not run",
        f"{CELLS[1]}: 1 of 1 verdicts are not as predicted: issue-a upstream ddp is ok, predicted broken",
    ]


def test_any_other_combination_runs_on_ray_too(stage: Stage) -> None:
    stage.project.free_cell(["trl=0.19.1", "transformers=4.53.3", "--date", "2025-07-11", "--engine", "ray"])
    (request,) = stage.requests
    ((cell,), day) = request.cells, "2025-07-11"
    assert (cell.id, str(cell.date)) == ("trl0.19.1-tf4.53.3", day)


@pytest.mark.parametrize("session", [WHOLE, "trl0.1.0"])
def test_a_session_for_which_nothing_was_run_is_no_success(stage: Stage, session: str) -> None:
    with pytest.raises(MatrixError, match="nothing was run on Ray for this session: "):
        stage.project.ray.check(session)


def test_parallel_sessions_are_refused(stage: Stage) -> None:
    stage.project.sweep.outermost = False
    with pytest.raises(MatrixError, match="leave out --parallel"):
        stage.project.matrix_cell("ray", ["--engine", "ray"])
    assert not stage.requests


@pytest.mark.parametrize("status, how", [(1, "ended, for the reason printed above"), (-9, "was killed by signal 9")])
def test_a_driver_that_fails_fails_the_session_and_is_not_started_again(stage: Stage, status: int, how: str) -> None:
    stage.status = status
    named = [f"matrix({cell_id})" for cell_id in CELLS[:2]]
    stage.project.cells(["-s", *named, "--", "--engine", "ray"])
    with pytest.raises(MatrixError, match=f"the driver of the sweep on Ray {how}"):
        stage.project.matrix_cell(CELLS[0], ["--engine", "ray"])
    with pytest.raises(MatrixError, match=f"{CELLS[1]} was not run"):
        stage.project.matrix_cell(CELLS[1], ["--engine", "ray"])
    assert len(stage.requests) == 1


def test_the_release_of_ray_is_the_clusters() -> None:
    extra = ["ray[client,default]>=2.46", "uv>=0.9"]
    assert ray_requirements(extra, None) == extra
    assert ray_requirements(extra, "2.58.1") == ["ray[client,default]==2.58.1", "uv>=0.9"]


def test_a_damaged_request_is_one_error() -> None:
    with pytest.raises(MatrixError, match="the request of the engine is damaged"):
        Request.from_json(json.dumps({"root": "/"}))
    assert session_module.WHOLE == "ray"
