"""Candidates of a bisection on a cluster of Ray: which of them the nodes observe, and what Ctrl-C leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.matrix.engines.made_up_node import ROOT
from tests.matrix.made_up import BROKEN

from .conftest import RayCluster, cluster_of, processes_in, wait_for

ENDS = ("trl0.15.2-tf4.48.3", "trl0.15.2-tf4.49.0")
SEARCH = ("releases", "--package", "transformers", "--good", "4.48.3", "--bad", "4.49.0", "--with", "trl=0.15.2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Three nodes that have the environments of both ends."""
    with cluster_of(tmp_path_factory.mktemp("cluster"), [ENDS, ENDS, ENDS]) as running:
        yield running


def started(cluster: RayCluster, state: Path) -> subprocess.Popen[str]:
    options = ("--issue", "grpo-train-sampler", "--jobs", "2", "--engine", "ray", "--address", cluster.address)
    command = [sys.executable, "-m", "pytest_trlcompat.bisect", *SEARCH, *options, "--state", str(state)]
    return subprocess.Popen(
        command, env=dict(cluster.variables), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_both_ends_are_observed_on_the_nodes_and_kept_here(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.play(BROKEN)
    output, _ = (search := started(cluster, tmp_path)).communicate(timeout=400)
    assert search.returncode == 2, output
    assert "3 nodes with " in output
    assert "both ends are bad, so there is no change to find" in output
    calls = [call for each in cluster.calls().values() for call in each]
    assert len(calls) == 2
    assert len(list(tmp_path.rglob("locks/*.txt"))) == 2
    output, _ = started(cluster, tmp_path).communicate(timeout=400)
    assert "both ends are bad" in output
    assert len([call for each in cluster.calls().values() for call in each]) == 2, "kept, not run again"


def test_ctrl_c_ends_the_candidates_on_the_nodes(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.play(BROKEN, seconds=300)
    search = started(cluster, tmp_path)
    wait_for(lambda: any(processes_in(node.cache) for node in cluster.nodes))
    search.send_signal(signal.SIGINT)
    output, _ = search.communicate(timeout=120)
    assert search.returncode == 130, output
    assert "stopped; every finished step is kept. To continue:" in output
    wait_for(lambda: not any(processes_in(node.cache) for node in cluster.nodes), 60)
