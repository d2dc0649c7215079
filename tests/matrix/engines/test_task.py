"""A cell as a task of a node: what it yields, how it goes on, and that nothing of it stays."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from pytest_trlcompat import _processes
from pytest_trlcompat.matrix.engines import node as node_module
from pytest_trlcompat.matrix.engines.messages import CellTask, Ended, Event, Started, State, Verdicts
from pytest_trlcompat.matrix.engines.payload import digest
from pytest_trlcompat.matrix.engines.task import NodeLost, cell_events
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.results import Sidecar
from tests.matrix.made_up import BROKEN, OK, SURPRISE

from .made_up_node import CELLS, ROOT, Node, task


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "cache")


def events(of: CellTask) -> list[Event]:
    """Without what the verdicts were measured with, which is that of the node's own files and environment."""
    return [
        Verdicts(event.position, re.sub(r', "provenance": "[0-9a-f.]{25}"', "", event.text))
        if isinstance(event, Verdicts)
        else event
        for event in cell_events(of, "node-1")
    ]


def state_of(event: Event) -> str:
    assert isinstance(event, State)
    return event.text


def test_a_cell_yields_its_verdicts_before_the_state_that_says_they_are_all(node: Node) -> None:
    node.play(OK, BROKEN, seconds=1)
    began, *between, ended = events(task(node.cache))
    assert (isinstance(began, Started) and began.node) == "node-1"
    assert ended == Ended(0, "", None, False)
    text = "".join(f"{record.to_json()}\n" for record in (OK, BROKEN))
    assert [event for event in between if isinstance(event, Verdicts)] == [Verdicts(0, text)]
    assert ['"state": "running"' in state_of(event) for event in between if isinstance(event, State)] == [True, False]
    assert '"state": "tested"' in state_of(between[-1])
    assert '"sweep": "first"' in state_of(between[-1])


def test_its_pytest_imports_this_project_as_it_was_sent_and_knows_nothing_of_ray(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "1")
    monkeypatch.setenv("TRLCOMPAT_DEVICE", "the node's")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it in a worker that has started already
    node.play(OK)
    events(task(node.cache, variables={"TRLCOMPAT_COMPARE_COLLECTIVES": "1", "TRLCOMPAT_CACHE": "/of/the/driver"}))
    (call,) = node.calls
    environ = call["environ"]
    assert isinstance(environ, dict)
    assert environ["PYTHONPATH"] == str(ROOT)
    assert environ["TRLCOMPAT_COMPARE_COLLECTIVES"] == "1"
    assert not {name for name in environ if name.startswith("RAY_")}
    assert not {"TRLCOMPAT_DEVICE", "TRLCOMPAT_CACHE"} & set(environ)
    assert environ.get("OMP_NUM_THREADS") == node_module._at_the_start().get("OMP_NUM_THREADS")


def test_caches_are_in_the_nodes_folder_unless_it_names_others(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", "/of/the/node")
    monkeypatch.delenv("TRLCOMPAT_CACHE", raising=False)
    node.play(OK)
    events(task(node.cache, own_caches=True))
    (call,) = node.calls
    environ = call["environ"]
    assert isinstance(environ, dict)
    assert (environ["UV_CACHE_DIR"], environ["TRLCOMPAT_CACHE"]) == ("/of/the/node", f"{node.cache}/compiled")


def left_by(node: Node) -> tuple[str, str]:
    """Verdicts and sidecar of a cell that did not end."""
    node.play(OK, status=1)  # so that pytest's status says that verdicts are missing
    found = events(task(node.cache))
    return f"{OK.to_json()}\n", [event.text for event in found if isinstance(event, State)][-1]


def test_a_cell_goes_on_after_the_verdicts_that_an_earlier_run_has_sent(node: Node) -> None:
    verdicts, state = left_by(node)
    node.play(BROKEN)
    found = events(task(node.cache, verdicts=verdicts, state=state))
    assert [event for event in found if isinstance(event, Verdicts)] == [
        Verdicts(len(verdicts.encode()), f"{BROKEN.to_json()}\n")
    ]
    assert node.calls[-1]["before"] == verdicts
    arguments = node.calls[-1]["arguments"]
    assert isinstance(arguments, list)
    assert "--trlcompat-resume" in arguments


def test_a_cell_begins_anew_where_what_its_verdicts_depend_on_has_changed(node: Node) -> None:
    verdicts, state = left_by(node)
    node.play(SURPRISE, BROKEN, status=1)
    found = events(task(node.cache, verdicts=verdicts, state=state, issues=("grpo-evaluate",)))
    parts = [event for event in found if isinstance(event, Verdicts)]
    assert parts[0] == Verdicts(0, "")
    assert (parts[1].position, "".join(part.text for part in parts[1:])) == (
        0,
        f"{SURPRISE.to_json()}\n{BROKEN.to_json()}\n",
    )


def test_what_a_killed_cell_has_printed_comes_with_its_status(node: Node) -> None:
    node.play(OK, status=-signal.SIGKILL)
    *_, ended = events(task(node.cache))
    assert isinstance(ended, Ended)
    assert (ended.status, ended.error) == (0, None)  # pytest was killed, which the sidecar says; its parent was not
    node.play(OK, seconds=60)
    stream = cell_events(task(node.cache), "node-1")
    while not isinstance(event := next(stream), Verdicts):
        pass
    (process,) = cell_processes(node)
    os.kill(process, signal.SIGKILL)
    *_, event = stream
    assert isinstance(event, Ended)
    assert event.status == -signal.SIGKILL


def test_a_cell_that_is_cancelled_ends_with_all_its_processes(node: Node) -> None:
    node.play(OK, seconds=60)
    stream = cell_events(task(node.cache), "node-1")
    while not isinstance(next(stream), Verdicts):
        pass
    assert len(of_the_cell(node)) == 2
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert not of_the_cell(node)
    assert time.monotonic() - began < 30
    assert not list((node.cache / "runs").iterdir())


def of_the_cell(node: Node) -> list[int]:
    """The processes whose command line names the node's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(str(node.cache)) in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def cell_processes(node: Node) -> list[int]:
    return [pid for pid in _processes.children() if pid in of_the_cell(node)]


def test_a_run_that_was_killed_leaves_nothing_after_the_next(node: Node) -> None:
    left = node.cache / "runs" / "0123"
    left.mkdir(parents=True)
    left.with_suffix(".used").touch()
    node.play(OK)
    events(task(node.cache))
    assert not list((node.cache / "runs").iterdir())


def test_the_locks_of_environments_are_kept_in_the_order_of_their_use(node: Node) -> None:
    node.play(OK)
    for cell_id in (CELLS[0], CELLS[1], CELLS[0]):
        events(task(node.cache, cell_id))
    locks = sorted((node.cache / "locks").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert [path.read_text().splitlines()[1] for path in locks] == [f"# cell: {CELLS[1]}", f"# cell: {CELLS[0]}"]


def test_an_error_of_the_matrix_is_no_verdict(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.play(OK)
    damaged = Sidecar(CELLS[0], {}, "running", "first").to_json().replace("running", "walking")
    *_, ended = events(task(node.cache, state=damaged))
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert "damaged ('state' is no state: 'walking')" in ended.error


def test_a_node_says_what_it_has_and_what_it_lacks(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    found = node_module.report("node-1", str(node.cache), (), None)
    assert (found.problem, len(found.environments)) == (None, 3)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert node_module.report("node-1", str(node.cache), (), None).problem == (
        "there is no C++ compiler; install one, such as g++"
    )


def test_a_python_without_uv_gets_an_environment_once_and_says_why_if_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    found = node_module.report("node-1", str(tmp_path), ("no-such-package-of-ours==1",), None)
    assert found.problem is not None
    assert "which installs what runs a cell" in found.problem
    assert "no-such-package-of-ours" in found.problem
    python = node_module.interpreter(tmp_path, ("pip",))
    assert python.exists()
    assert python.is_relative_to(tmp_path)
    before = (python.parents[1] / "complete").stat().st_mtime_ns
    assert node_module.interpreter(tmp_path, ("pip",)) == python
    assert (python.parents[1] / "complete").stat().st_mtime_ns == before


def test_a_nodes_folder_is_its_own_else_the_drivers_else_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(node_module.NODE_CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert node_module.node_cache(None) == Path("/x/pytest-trlcompat/nodes")
    assert node_module.node_cache("/drivers") == Path("/drivers")
    monkeypatch.setenv(node_module.NODE_CACHE, "/own")
    assert node_module.node_cache("/drivers") == Path("/own")


def test_a_node_that_has_imported_other_files_runs_nothing(node: Node) -> None:
    right = digest(Layout(ROOT))
    assert node_module.report("node-1", str(node.cache), (), right).problem is None
    found = node_module.report("node-1", str(node.cache), (), "0123").problem
    assert found is not None
    assert f"this project's files in {ROOT} are not those of the command" in found
    node.play(OK)
    with pytest.raises(MatrixError, match="are not those of the command"):
        events(task(node.cache, files="0123"))
    assert events(task(node.cache, files=right))[-1] == Ended(0, "")
    assert len(node.calls) == 1


def test_a_cell_ends_with_what_has_started_its_worker(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.play(OK, seconds=60)
    stream = cell_events(task(node.cache), "node-1")
    while not isinstance(next(stream), Verdicts):
        pass
    monkeypatch.setattr(os, "getppid", lambda: 0)  # not 1, which adopts these tests where their shell has ended
    with pytest.raises(NodeLost, match="the node's own process of Ray has ended"):
        list(stream)
    assert not of_the_cell(node)
