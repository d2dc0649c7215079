"""A connection to a cluster of Ray, or a cluster of this machine alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from pytest_trlcompat._cleaner import OwnFolder
from pytest_trlcompat.matrix.engines import own_cluster
from pytest_trlcompat.matrix.engines.messages import NodeTask
from pytest_trlcompat.matrix.engines.options import RayOptions
from pytest_trlcompat.matrix.engines.payload import copy_project
from pytest_trlcompat.matrix.engines.ray_streams import RayStreams, RemoteStreams
from pytest_trlcompat.matrix.engines.ray_tasks import RayPrograms
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout

__all__ = ["GIB", "connected", "places", "programs", "streams"]

GIB = 1024**3

_MARK = "_TRLCOMPAT_RAY"
"""An environment variable that marks the processes of a cluster that this one has started."""

_QUEUED = 64
"""Cells that wait in Ray at least, where a cluster grows by demand."""

_CONNECTION = (ConnectionError, RuntimeError, TimeoutError, ValueError)
"""What Ray raises for an address that is none, a cluster that does not answer, or one of another release."""


@contextlib.contextmanager
def connected(options: RayOptions, layout: Layout) -> Iterator[None]:
    """Connect to the cluster for the block, and send it this project's files.

    Raises:
        MatrixError: there is no such cluster, or it has another release of Ray or Python.
    """
    with _folder() as folder:
        project = Path(folder) / "project"
        copy_project(layout, project)
        try:
            ray.init(**_arguments(options, project, folder))
        except _CONNECTION as error:
            raise MatrixError(_explained(options, error)) from error
        finally:
            shutil.rmtree(project)  # it has been sent
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder that is removed also when this process is killed; it then ends the cluster that uses it, too."""
    # A path below /tmp is short enough for the names of Ray's sockets; one below $TMPDIR may not be.
    folder = tempfile.mkdtemp(prefix="trlcompat-ray-", dir="/tmp")
    mark = uuid.uuid4().hex
    # Ray's processes inherit it, by which the folder's cleaner finds and ends them.
    os.environ[_MARK] = mark
    own_folder = OwnFolder(Path(folder), f"{_MARK}={mark}")
    try:
        yield folder
    finally:
        own_folder.remove()


def _arguments(options: RayOptions, project: Path, folder: str) -> dict[str, Any]:
    # PYTHONPATH, which Ray passes on, would let this checkout's files pass for those that were sent.
    # Without eager_install the files are unpacked where and when a task needs them. Else all nodes do it at once, and
    # those of one machine into one folder, which each empties first: a task that starts then finds nothing.
    environment = {"working_dir": str(project), "config": {"eager_install": False}}
    common: dict[str, Any] = {"runtime_env": environment, "log_to_driver": False, "logging_level": "critical"}
    if options.address is not None:
        return {**common, "address": own_cluster.address_of(options, os.environ)}
    # By default Ray reports to its makers how it is used.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Without "local" Ray connects to whatever cluster runs on this machine.
    alone = {"address": "local", "_node_ip_address": own_cluster.HOST, "_temp_dir": folder, "include_dashboard": False}
    return {**common, **alone, "num_cpus": os.cpu_count()}


def _explained(options: RayOptions, error: Exception) -> str:
    what = f"no connection to the cluster at --address {options.address}" if options.address else "Ray does not start"
    return (
        f"{what}, with Ray {ray.__version__}: {str(error).strip()} -- A cluster needs the same release of Ray and the "
        "same Python as the command (--ray-version, --ray-python). HOST:PORT and auto are for a machine that is one of "
        "its nodes, ray://HOST:10001 is for any other"
    )


def streams(options: RayOptions) -> RayStreams | RemoteStreams:
    """The cells of this command on the cluster.

    Raises:
        MatrixError: no node has what a cell needs.
    """
    memory = _memory(options)
    remote = options.address is not None and options.address.startswith("ray://")
    return (RemoteStreams if remote else RayStreams)(options.cpus, memory)


def programs(options: RayOptions, task: NodeTask) -> RayPrograms[Any]:
    """The programs of this command on the cluster, each of which needs what a cell needs.

    Raises:
        MatrixError: no node has that.
    """
    return RayPrograms(options.cpus, _memory(options), task)


def _memory(options: RayOptions) -> int:
    """The memory of a cell, in bytes, after a look at what the nodes have."""
    memory = int(options.memory * GIB)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # Ray would keep a task that fits no node waiting for ever.
    if not any(node.get("CPU", 0) >= options.cpus and node.get("memory", 0) >= memory for node in nodes):
        raise MatrixError(
            f"no node of the cluster has what a cell needs, {options.cpus:g} CPUs and {options.memory:g} GiB; there "
            f"are: {', '.join(map(_size, nodes)) or 'none'}"
            ". Ask for less with --cell-cpus and --cell-memory, or add a node"
        )
    return memory


def places(options: RayOptions) -> int:
    """How many cells are submitted at a time: twice as many as the cluster has room for, and some."""
    fitting = sum(int(node["Resources"].get("CPU", 0) // options.cpus) for node in ray.nodes() if node["Alive"])
    # Twice, so that a place that gets free is never idle.
    return 2 * fitting + _QUEUED


def _size(node: dict[str, float]) -> str:
    return f"{node.get('CPU', 0):g} CPUs with {node.get('memory', 0) / GIB:.1f} GiB"
