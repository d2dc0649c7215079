"""Cells on a cluster of Ray: where they run, what comes back, and what happens when something of it is killed."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from pytest_trlcompat import _processes
from pytest_trlcompat.matrix.engines.options import RayOptions
from tests.matrix.engines.made_up_node import CELLS
from tests.matrix.made_up import BROKEN, OK, SURPRISE

from .conftest import NODES, Checkout, RayCluster, cluster_of, processes_in, wait_for


@pytest.mark.parametrize("way", ["from one of its nodes", "through Ray's client"])
def test_cells_run_on_the_nodes_and_their_verdicts_come_back(cluster: RayCluster, checkout: Checkout, way: str) -> None:
    cluster.play(OK, BROKEN, seconds=2)
    address = cluster.address if way == "from one of its nodes" else cluster.client
    status, output = checkout.run(cluster.variables, RayOptions(address))
    assert status == 0, output
    assert [checkout.played(cell_id) for cell_id in CELLS] == [[OK, BROKEN]] * len(CELLS)
    states = [checkout.state(cell_id) for cell_id in CELLS]
    assert [(state.state, state.sweep, bool(state.digest)) for state in states if state] == [
        ("tested", "1-first", True)
    ] * len(CELLS)
    assert f"{NODES} nodes with {NODES * len(CELLS)} environments" in output
    assert f"[{len(CELLS)}/{len(CELLS)}] " in output
    assert checkout.running_cells() == []
    calls = [call for each in cluster.calls().values() for call in each]
    assert len(calls) == len(CELLS)
    for call in calls:
        environ = call["environ"]
        assert isinstance(environ, dict)
        assert not {name for name in environ if name.startswith("RAY_")}
        assert "/working_dir_files/" in environ["PYTHONPATH"]  # what was sent, not this checkout
    assert sum(map(bool, cluster.calls().values())) > 1


def test_files_are_unpacked_when_a_node_needs_them(cluster: RayCluster, checkout: Checkout) -> None:
    # Nodes of one machine unpack into one folder: were all to do it at once, one would find it empty.
    cluster.play(OK)
    before = [path.stat().st_size for path in agent_logs(cluster)]
    status, output = checkout.run(cluster.variables, RayOptions(cluster.address), CELLS[0])
    assert status == 0, output
    written = [path.read_bytes()[size:] for path, size in zip(agent_logs(cluster), before, strict=True)]
    assert len(written) == 1 + NODES
    # The head has no CPUs, and no task. It unpacks for Ray's client, by which another test of this cluster came.
    assert sum(b"Creating runtime env" in text for text in written) == NODES


def agent_logs(cluster: RayCluster) -> list[Path]:
    return sorted(Path(cluster.logs).glob("runtime_env_agent*.log"))


def test_a_verdict_that_is_not_as_predicted_ends_its_cell_alone(cluster: RayCluster, checkout: Checkout) -> None:
    cluster.play(SURPRISE, status=1)
    status, output = checkout.run(cluster.variables, RayOptions(cluster.address), CELLS[0])
    assert status == 0, output
    assert f"{CELLS[0]}: 1 of 1 verdicts are not as predicted" in output
    state = checkout.state(CELLS[0])
    assert state is not None
    assert state.state == "tested"


def test_what_a_cell_printed_is_kept_where_it_did_not_end(cluster: RayCluster, checkout: Checkout) -> None:
    cluster.play(OK, status=4)
    status, output = checkout.run(cluster.variables, RayOptions(cluster.address), CELLS[0])
    assert status == 0, output
    assert f"{CELLS[0]} was not finished: pytest ended with exit status 4" in output


def test_a_cell_goes_on_after_its_worker_was_killed_and_is_untestable_after_the_second(
    cluster: RayCluster, checkout: Checkout
) -> None:
    cluster.play(OK, seconds=300)
    driver = checkout.start(cluster.variables, RayOptions(cluster.address), CELLS[0])
    for number in (1, 2):
        wait_for(partial(has_begun, cluster, checkout, number))
        (process,) = of(cluster)
        os.kill(parent_of(process), signal.SIGKILL)
        wait_for(partial(has_ended, cluster, process))
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 0, output
    assert checkout.played(CELLS[0]) in ([OK], [OK, OK])
    assert {call["before"] for call in calls(cluster)} == {None, checkout.text(CELLS[0]).splitlines(keepends=True)[0]}
    state = checkout.state(CELLS[0])
    assert state is not None
    assert state.state == "untestable"
    assert state.reason is not None
    assert state.reason.count("WorkerCrashedError") == 2
    assert "goes on elsewhere after its last verdict" in output


def of(cluster: RayCluster) -> list[int]:
    """The cells' processes that a worker of Ray has started."""
    found = [pid for node in cluster.nodes for pid in processes_in(node.cache)]
    return [pid for pid in found if b"cell_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def has_begun(cluster: RayCluster, checkout: Checkout, times: int) -> bool:
    return len(of(cluster)) == 1 and len(calls(cluster)) == times and bool(checkout.text(CELLS[0]))


def has_ended(cluster: RayCluster, process: int) -> bool:
    return process not in of(cluster)


def calls(cluster: RayCluster) -> list[dict[str, object]]:
    return [call for each in cluster.calls().values() for call in each]


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_ctrl_c_ends_what_runs_on_the_nodes_and_the_same_command_continues(
    cluster: RayCluster, checkout: Checkout
) -> None:
    cluster.play(OK, seconds=300)
    driver = checkout.start(cluster.variables, RayOptions(cluster.address))
    wait_for(lambda: all(map(checkout.text, CELLS)))
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130, output
    assert "3 running cells were stopped; the same command continues after their last verdicts" in output
    assert not of(cluster)
    states = [checkout.state(cell_id) for cell_id in CELLS]
    assert [(state.state, state.reason) for state in states if state] == [("interrupted", "it was stopped")] * len(
        CELLS
    )
    cluster.play(BROKEN)
    status, output = checkout.run(cluster.variables, RayOptions(cluster.address), sweep="2-second")
    assert status == 0, output
    assert [checkout.verdicts(cell_id) for cell_id in CELLS] == [(OK, BROKEN)] * len(CELLS)


def test_a_driver_that_is_killed_and_started_again_loses_nothing_and_repeats_nothing(
    cluster: RayCluster, checkout: Checkout
) -> None:
    cluster.play(OK)
    first, rest = CELLS[0], CELLS[1:]
    assert checkout.run(cluster.variables, RayOptions(cluster.address), first, sweep="1-first")[0] == 0
    cluster.play(OK, seconds=300)
    driver = checkout.start(cluster.variables, RayOptions(cluster.address), *rest, sweep="1-first")
    wait_for(lambda: all(map(checkout.text, rest)))
    driver.kill()
    driver.wait()
    wait_for(lambda: not of(cluster), 60)  # its cells end with it
    assert checkout.running_cells() == sorted(rest)
    before = len(calls(cluster))
    cluster.play(BROKEN)
    status, output = checkout.run(cluster.variables, RayOptions(cluster.address), sweep="2-second")
    assert status == 0, output
    assert "1 of 3 cells were finished before; their verdicts are reused" in output
    assert len(calls(cluster)) == before + len(rest)
    assert [checkout.verdicts(cell_id) for cell_id in CELLS] == [(OK,), *[(OK, BROKEN)] * len(rest)]


def test_a_cluster_that_is_not_there_is_one_error(cluster: RayCluster, checkout: Checkout) -> None:
    status, output = checkout.run(cluster.variables, RayOptions("ray://127.0.0.1:9"))
    assert status == 1
    assert "no connection to the cluster at --address ray://127.0.0.1:9" in output
    assert "Traceback" not in output


def test_cells_that_need_more_than_any_node_has_are_one_error(cluster: RayCluster, checkout: Checkout) -> None:
    status, output = checkout.run(cluster.variables, RayOptions(cluster.address, cpus=64))
    assert status == 1
    assert "no node of the cluster has what a cell needs, 64 CPUs and 2 GiB; there are: " in output


def test_cells_go_where_their_environments_are_and_on_when_that_node_is_killed(
    tmp_path: Path, checkout: Checkout
) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    with cluster_of(folder, [CELLS[:2], CELLS[2:], CELLS[:1]]) as cluster:
        cluster.nodes[0].play(OK)
        cluster.nodes[1].play(OK)
        cluster.nodes[2].play(OK)
        for cell_id, number in ((CELLS[1], 0), (CELLS[2], 1)):
            status, output = checkout.run(cluster.variables, RayOptions(cluster.address), cell_id)
            assert status == 0, output
            assert "building its environment" not in output
            assert len(cluster.nodes[number].calls) == 1
        cluster.nodes[0].play(OK, seconds=300)
        cluster.nodes[2].play(OK, seconds=300)
        driver = checkout.start(cluster.variables, RayOptions(cluster.address), CELLS[0])
        wait_for(lambda: checkout.text(CELLS[0]))
        number = 0 if len(cluster.nodes[0].calls) == 2 else 2
        other = 2 - number
        cluster.nodes[other].play(BROKEN)
        os.kill(cluster.raylets[number], signal.SIGKILL)
        output, _ = driver.communicate(timeout=120)
        assert driver.returncode == 0, output
        assert checkout.verdicts(CELLS[0]) == (OK, BROKEN)
        assert "goes on elsewhere after its last verdict" in output
        wait_for(lambda: not processes_in(cluster.nodes[number].cache), 30)


def test_a_node_that_does_not_answer_is_named_and_gets_nothing(tmp_path: Path, checkout: Checkout) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    with cluster_of(folder, [CELLS[:1], CELLS[:1]]) as cluster:
        cluster.play(OK)
        os.kill(cluster.raylets[0], signal.SIGSTOP)
        try:
            status, output = checkout.run(cluster.variables, RayOptions(cluster.address), CELLS[0])
        finally:
            os.kill(cluster.raylets[0], signal.SIGCONT)
        assert status == 0, output
        assert " gets no cells: it could not say what it has: " in output
        assert [len(node.calls) for node in cluster.nodes] == [0, 1]


def test_a_cluster_of_this_machine_alone_is_started_and_ends_with_the_command(
    cluster: RayCluster, checkout: Checkout
) -> None:
    mark = "TRLCOMPAT_TEST_OF_LOCAL_RAY"
    variables = {**cluster.variables, mark: "1"}
    cache = cluster.nodes[0].cache
    before = set(Path("/tmp").glob("trlcompat-ray-*"))
    cluster.play(OK)
    status, output = checkout.run(variables, RayOptions(node_cache=str(cache)))
    assert status == 0, output
    assert len(cluster.nodes[0].calls) == len(CELLS)
    wait_for(lambda: not _processes.marked(f"{mark}=1"), 30)
    assert set(Path("/tmp").glob("trlcompat-ray-*")) <= before


def test_a_cluster_of_this_machine_alone_ends_with_a_command_that_is_killed(
    cluster: RayCluster, checkout: Checkout
) -> None:
    mark = "TRLCOMPAT_TEST_OF_LOCAL_RAY"
    cluster.play(OK, seconds=300)
    before = set(Path("/tmp").glob("trlcompat-ray-*"))
    options = RayOptions(node_cache=str(cluster.nodes[0].cache))
    driver = checkout.start({**cluster.variables, mark: "1"}, options, CELLS[0])
    wait_for(lambda: checkout.text(CELLS[0]))
    assert set(Path("/tmp").glob("trlcompat-ray-*")) - before
    driver.kill()
    driver.wait()
    wait_for(lambda: not _processes.marked(f"{mark}=1"), 60)
    wait_for(lambda: set(Path("/tmp").glob("trlcompat-ray-*")) <= before, 60)
