"""What the driver of a sweep decides: what is run again, what is given up, and what it leaves when it is stopped.

What runs the cells is a script of events, which stands for Ray and its nodes; tests/ray has real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from pytest_trlcompat.catalog.verdict import Record, read_records
from pytest_trlcompat.matrix.engines.driver import Driver
from pytest_trlcompat.matrix.engines.messages import (
    Cancelled,
    CellTask,
    Done,
    Ended,
    Failed,
    Line,
    Lost,
    NodeReport,
    Started,
    State,
    TaskEvent,
    Verdicts,
)
from pytest_trlcompat.matrix.engines.nodes import Nodes
from pytest_trlcompat.matrix.environments import name_of
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import known
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.matrix.results import Sidecar, read_sidecar
from pytest_trlcompat.matrix.sweep import Sweep
from tests.matrix.made_up import BROKEN, OK, SURPRISE

from .made_up_node import CELLS, ROOT

MATRIX = read_matrix(Layout(ROOT).matrix)
PASSED = Ended(0, "")


def sidecar(cell_id: str, state: str, sweep: str = "first", **more: object) -> str:
    return dataclasses.replace(Sidecar(cell_id, {"trl": "1"}, state, sweep), **more).to_json()  # type: ignore[arg-type]


def lines(*records: Record) -> str:
    return "".join(f"{record.to_json()}\n" for record in records)


def passing(cell_id: str, node: str = "n1", sweep: str = "first") -> list[TaskEvent]:
    """A whole run with one verdict."""
    return [
        *begun(cell_id, node, sweep),
        State(sidecar(cell_id, "tested", sweep)),
        PASSED,
        Done(),
    ]


def begun(cell_id: str, node: str = "n1", sweep: str = "first") -> list[TaskEvent]:
    """A run with one verdict that has not ended."""
    return [Started(node, f"host-{node}"), Verdicts(0, lines(OK)), State(sidecar(cell_id, "running", sweep))]


class Script:
    """For each cell the events of its first run, of its second, and so on; one event a poll."""

    def __init__(self) -> None:
        self.runs: dict[str, list[list[TaskEvent]]] = {}
        self.started: list[tuple[CellTask, list[str], list[str]]] = []
        self.going: dict[str, Iterator[TaskEvent]] = {}
        self.cancelled = False
        self.interrupt: Callable[[], bool] = lambda: False

    def start(self, task: CellTask, preferred: Collection[str], avoided: Collection[str]) -> None:
        self.started.append((task, sorted(preferred), sorted(avoided)))
        self.going[task.id] = iter(self.runs[task.id].pop(0))

    def poll(self, seconds: float) -> list[tuple[str, TaskEvent]]:
        if not self.cancelled and self.interrupt():
            raise KeyboardInterrupt
        found: list[tuple[str, TaskEvent]] = []
        for cell_id, events in list(self.going.items()):
            event = next(events, None)
            if event is None:
                event = Cancelled() if self.cancelled else Line("nothing new")
            if isinstance(event, (Done, Lost, Failed, Cancelled)):
                del self.going[cell_id]
            found.append((cell_id, event))
        return found

    def cancel(self) -> None:
        self.cancelled = True


class Stage:
    def __init__(self, root: Path) -> None:
        for name in ("fixtures", "suites", "pytest_trlcompat"):
            (root / name).mkdir(exist_ok=True)
        (root / "fixtures" / "locks").symlink_to(ROOT / "fixtures" / "locks")
        self.layout = Layout(root)
        self.said: list[str] = []

    def drive(
        self,
        script: Script,
        cells: Sequence[str] = CELLS[:1],
        nodes: Sequence[NodeReport] = (),
        sweep: str = "first",
        fresh: bool = False,
        limit: int = 1000,
        tests: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        times = iter(range(0, 10_000, 10))
        template = CellTask("", {}, None, None, sweep, issues=("grpo-train-sampler",))
        named = Sweep(self.layout, {Sweep.VARIABLE: sweep})
        costs = {CELLS[0]: 10.0, CELLS[1]: 30.0}
        how = (costs, Nodes(nodes, "cells"), self.said.append, lambda: next(times), limit, tests)
        driver = Driver(MATRIX, named, script, template, *how)
        driver.run([MATRIX.cell(cell_id) for cell_id in cells], fresh=fresh)

    def state(self, cell_id: str = CELLS[0]) -> Sidecar:
        return read_sidecar(self.layout.results / f"{cell_id}.cell.json")

    def verdicts(self, cell_id: str = CELLS[0]) -> tuple[Record, ...]:
        return tuple(read_records(self.layout.results / f"{cell_id}.jsonl"))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_cells_that_take_longest_are_submitted_first_and_the_unknown_before_them(stage: Stage) -> None:
    script = Script()
    script.runs = {cell_id: [passing(cell_id)] for cell_id in CELLS}
    stage.drive(script, CELLS)
    assert [task.id for task, _, _ in script.started] == [CELLS[2], CELLS[1], CELLS[0]]
    assert [stage.state(cell_id).state for cell_id in CELLS] == ["tested"] * 3
    assert [len(stage.verdicts(cell_id)) for cell_id in CELLS] == [1, 1, 1]
    assert stage.said[-1] == f"[3/3] 6.0 cells a minute; {CELLS[0]}: 1 verdict in 0 s, all as predicted [host-n1]"
    assert not list((stage.layout.results / ".sweeps" / "first").iterdir())


def test_each_cell_runs_its_own_tests_of_the_suites(stage: Stage) -> None:
    script = Script()
    script.runs = {cell_id: [passing(cell_id)] for cell_id in CELLS[:2]}
    stage.drive(script, CELLS[:2], tests={CELLS[0]: "not rows_2"})
    assert {task.id: task.pytest_arguments for task, _, _ in script.started} == {
        CELLS[0]: ("-m", "not rows_2"),
        CELLS[1]: (),
    }


def test_no_more_cells_are_submitted_at_a_time_than_the_limit(stage: Stage) -> None:
    class Counting(Script):
        most = 0

        def start(self, task: CellTask, preferred: Collection[str], avoided: Collection[str]) -> None:
            super().start(task, preferred, avoided)
            self.most = max(self.most, len(self.going))

    script = Counting()
    script.runs = {cell_id: [passing(cell_id)] for cell_id in CELLS}
    stage.drive(script, CELLS, limit=2)
    assert (script.most, len(script.started)) == (2, 3)
    assert [stage.state(cell_id).state for cell_id in CELLS] == ["tested"] * 3


def test_a_lost_cell_goes_on_after_its_last_verdict(stage: Stage) -> None:
    first: list[TaskEvent] = [*begun(CELLS[0]), Lost("NodeDiedError: the node is dead")]
    second: list[TaskEvent] = [
        Started("n2", "host-n2"),
        Verdicts(len(lines(OK)), lines(BROKEN)),
        State(sidecar(CELLS[0], "tested")),
        PASSED,
        Done(),
    ]
    script = Script()
    script.runs = {CELLS[0]: [first, second]}
    stage.drive(script)
    assert [task.verdicts for task, _, _ in script.started] == ["", lines(OK)]
    assert script.started[1][0].state == sidecar(CELLS[0], "running")
    assert stage.verdicts() == (OK, BROKEN)
    assert (
        f"{CELLS[0]}: lost (host-n1: NodeDiedError: the node is dead); goes on elsewhere after its last verdict"
        in stage.said
    )


def test_verdicts_of_a_lost_run_are_not_there_twice_where_the_next_begins_anew(stage: Stage) -> None:
    again = [Started("n2", "host-n2"), Verdicts(0, ""), Verdicts(0, lines(BROKEN, OK)), *passing(CELLS[0])[2:]]
    script = Script()
    script.runs = {CELLS[0]: [[*begun(CELLS[0]), Lost("x")], again]}
    stage.drive(script)
    assert (stage.layout.results / f"{CELLS[0]}.jsonl").read_text() == lines(BROKEN, OK)


def test_a_cell_that_is_lost_twice_is_untestable_and_says_so(stage: Stage) -> None:
    first: list[TaskEvent] = [*begun(CELLS[0]), Lost("NodeDiedError: dead")]
    second: list[TaskEvent] = [Started("n2", "host-n2"), Verdicts(len(lines(OK)), lines(BROKEN)), *first[2:]]
    script = Script()
    script.runs = {CELLS[0]: [first, second]}
    stage.drive(script)
    assert (stage.state().state, stage.state().reason) == (
        "untestable",
        "what ran it was lost each time: host-n1: NodeDiedError: dead; host-n2: NodeDiedError: dead",
    )
    assert stage.said[-1].endswith("is untestable: " + (stage.state().reason or "") + " [host-n2]")


def test_a_process_that_is_killed_counts_as_lost_one_that_fails_does_not(stage: Stage) -> None:
    killed = [*begun(CELLS[0]), Ended(-9, "Killed"), Done()]
    script = Script()
    script.runs = {CELLS[0]: [killed, [*begun(CELLS[0])[:1], Ended(1, "Traceback\nKeyError: 'x'"), Done()]]}
    stage.drive(script)
    assert stage.state().state == "interrupted"
    assert stage.state().reason == (
        "host-n1: its process was killed by signal 9; host-n1: its process ended with exit status 1: KeyError: 'x'"
    )
    assert (stage.layout.results / f"{CELLS[0]}.log").read_text() == "Traceback\nKeyError: 'x'"


def test_a_node_that_cannot_run_cells_gets_no_more_of_them(stage: Stage) -> None:
    nodes = [NodeReport("n1", "host-n1", "/c"), NodeReport("n2", "host-n2", "/c")]
    failing: list[TaskEvent] = [Started("n1", "host-n1"), Failed("MatrixError: no venv")]
    script = Script()
    script.runs = {CELLS[0]: [failing, passing(CELLS[0], "n2")]}
    stage.drive(script, nodes=nodes)
    assert [avoided for _, _, avoided in script.started] == [[], ["n1"]]
    assert stage.state().state == "tested"


def test_a_sweep_ends_before_it_begins_where_no_node_can_run_cells(stage: Stage) -> None:
    nodes = [NodeReport("n1", "host-n1", "/c", problem="there is no C++ compiler")]
    with pytest.raises(MatrixError, match="no node can run cells"):
        stage.drive(Script(), nodes=nodes)
    assert stage.said == ["host-n1 gets no cells: there is no C++ compiler"]


def test_a_cell_prefers_the_nodes_that_have_its_environment(stage: Stage) -> None:
    lock = known(MATRIX, MATRIX.cell(CELLS[0]), stage.layout)
    assert lock is not None
    name = name_of(lock, stage.layout)
    nodes = [
        NodeReport("n1", "host-n1", "/c", ("cell-other",)),
        NodeReport("n2", "host-n2", "/c", (name,)),
        NodeReport("n3", "host-n3", "/c", (name,), problem="no compiler"),
    ]
    script = Script()
    script.runs = {cell_id: [passing(cell_id)] for cell_id in CELLS[:2]}
    stage.drive(script, CELLS[:2], nodes)
    assert {task.id: (preferred, avoided) for task, preferred, avoided in script.started} == {
        CELLS[0]: (["n2"], ["n3"]),
        CELLS[1]: ([], ["n3"]),
    }


def test_ctrl_c_leaves_what_is_done_and_the_same_command_continues(stage: Stage) -> None:
    script = Script()
    script.runs = {CELLS[0]: [begun(CELLS[0])], CELLS[1]: [passing(CELLS[1])], CELLS[2]: [[]]}
    polls = iter(range(100))
    script.interrupt = lambda: next(polls) == 6
    with pytest.raises(KeyboardInterrupt):
        stage.drive(script, CELLS)
    assert script.cancelled
    assert (stage.state().state, stage.state().reason, stage.verdicts()) == ("interrupted", "it was stopped", (OK,))
    assert stage.state(CELLS[1]).state == "tested"
    assert not (stage.layout.results / f"{CELLS[2]}.cell.json").exists()
    assert stage.said[-1] == "1 running cell was stopped; the same command continues after its last verdict"
    assert [path.name for path in (stage.layout.results / ".sweeps" / "first").iterdir()] == [CELLS[0]]


def test_a_cell_that_an_interrupted_sweep_has_finished_is_not_run_again(stage: Stage) -> None:
    from pytest_trlcompat.matrix.job import _digest
    from pytest_trlcompat.matrix.suite_run import code_digest

    lock = known(MATRIX, MATRIX.cell(CELLS[0]), stage.layout)
    assert lock is not None
    digest = _digest(lock, code_digest(stage.layout), ("grpo-train-sampler",), ())
    script = Script()
    events = passing(CELLS[0])
    events[3] = State(sidecar(CELLS[0], "tested", digest=digest, provenance=f"{'a' * 12}.{'b' * 12}"))
    script.runs = {CELLS[0]: [events], CELLS[1]: [begun(CELLS[1])]}
    polls = iter(range(100))
    script.interrupt = lambda: next(polls) == 8
    with pytest.raises(KeyboardInterrupt):
        stage.drive(script, CELLS[:2])
    following = Script()
    following.runs = {CELLS[1]: [passing(CELLS[1], sweep="second")]}
    stage.drive(following, CELLS[:2], sweep="second")
    assert "1 of 2 cells were finished before; their verdicts are reused (not with --fresh)" in stage.said
    assert [task.id for task, _, _ in following.started] == [CELLS[1]]
    assert stage.state().sweep == "second"


def test_fresh_discards_what_was_left(stage: Stage) -> None:
    script = Script()
    script.runs = {CELLS[0]: [begun(CELLS[0])]}
    polls = iter(range(100))
    script.interrupt = lambda: next(polls) == 4
    with pytest.raises(KeyboardInterrupt):
        stage.drive(script)
    again = Script()
    again.runs = {CELLS[0]: [[Started("n1", "host-n1"), Verdicts(0, lines(BROKEN)), *passing(CELLS[0])[3:]]]}
    stage.drive(again, fresh=True)
    assert (again.started[0][0].verdicts, again.started[0][0].state) == ("", None)
    assert stage.verdicts() == (BROKEN,)


def test_a_cell_that_another_command_has_changed_meanwhile_is_run_again(stage: Stage) -> None:
    script = Script()
    script.runs = {CELLS[0]: [begun(CELLS[0])]}
    polls = iter(range(100))
    script.interrupt = lambda: next(polls) == 4
    with pytest.raises(KeyboardInterrupt):
        stage.drive(script)
    path = stage.layout.results / f"{CELLS[0]}.jsonl"

    class Changing(Script):
        def start(self, task: CellTask, preferred: Collection[str], avoided: Collection[str]) -> None:
            super().start(task, preferred, avoided)
            if len(self.started) == 1:
                path.write_text(lines(OK, BROKEN))

    again = Changing()
    wrong = [Started("n1", "h"), Verdicts(len(lines(OK)), lines(OK)), *passing(CELLS[0])[3:]]
    right = [Started("n1", "h"), Verdicts(len(lines(OK, BROKEN)), lines(SURPRISE)), *passing(CELLS[0])[3:]]
    again.runs = {CELLS[0]: [wrong, right]}
    stage.drive(again, sweep="first")
    assert stage.verdicts() == (OK, BROKEN, SURPRISE)
    assert f"{CELLS[0]}: another command has run it meanwhile; it is run again" in stage.said


def test_a_gap_in_the_verdicts_is_an_error(stage: Stage) -> None:
    script = Script()
    script.runs = {CELLS[0]: [[Started("n1", "h"), Verdicts(10, lines(OK))]]}
    with pytest.raises(MatrixError, match="0 bytes, but the next verdicts belong at 10"):
        stage.drive(script)
