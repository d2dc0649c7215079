"""A cluster of Ray with three nodes on this machine, each with a folder of its own, and a checkout to sweep from.

Ray, its nodes, the driver and the cells' processes are real; the cells' environments are made up, so that a cell takes
seconds. Without Ray these tests are skipped, and say what to run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_trlcompat import _processes
from pytest_trlcompat._provenance import code_digest
from pytest_trlcompat.catalog.verdict import Record, read_records
from pytest_trlcompat.matrix.engines.options import RayOptions
from pytest_trlcompat.matrix.engines.request import Request
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.results import Sidecar, read_sidecar
from pytest_trlcompat.matrix.sweep import Sweep
from tests.matrix.engines.made_up_node import CELLS, ROOT, Node, cell

NODES = 3
_MARK = "TRLCOMPAT_TEST_OF_RAY"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("ray") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs Ray; run: nox -s cluster"))


@dataclass(frozen=True)
class RayCluster:
    """A cluster that runs.

    Attributes:
        raylets: the processes of its nodes.
        logs: Ray's folder of what its own processes write.
    """

    address: str
    client: str
    raylets: Sequence[int]
    logs: str
    nodes: Sequence[Node]
    variables: Mapping[str, str]

    def play(self, *records: Record, status: int = 0, seconds: float = 0) -> None:
        """Set what pytest does, on every node."""
        for node in self.nodes:
            node.play(*records, status=status, seconds=seconds)

    def calls(self) -> dict[int, list[dict[str, object]]]:
        return {number: node.calls for number, node in enumerate(self.nodes)}


@contextlib.contextmanager
def cluster_of(folder: Path, cells: Sequence[Sequence[str]]) -> Iterator[RayCluster]:
    """A cluster; for each node the cells whose environments it has."""
    nodes = [Node(folder / f"node{number}", each) for number, each in enumerate(cells)]
    mark = uuid.uuid4().hex
    home = folder / "home"  # where Ray writes the token of its clusters
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TRLCOMPAT_", "PYTEST_"))}
    variables = {**kept, "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(home)}
    # Ray gives the server of a client 30 seconds to start, which a busy machine does not keep.
    variables["RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S"] = "180"
    command = [sys.executable, str(Path(__file__).with_name("nodes.py")), str(folder), str(len(nodes))]
    with open(folder / "nodes.txt", "wb") as log:
        running = subprocess.Popen(
            command,
            env={**variables, _MARK: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=folder,
        )
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line, (folder / "nodes.txt").read_text()
        yield RayCluster(**json.loads(line), nodes=nodes, variables=variables)
    finally:
        assert running.stdin is not None
        running.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(30)
        running.kill()
        running.wait()
        if running.stdout is not None:
            running.stdout.close()
        _processes.kill_marked(f"{_MARK}={mark}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Three nodes that have all environments."""
    with cluster_of(tmp_path_factory.mktemp("cluster"), [CELLS] * NODES) as running:
        for node in running.nodes:
            node.play()
        yield running


@pytest.fixture(autouse=True)
def forget_calls(request: pytest.FixtureRequest) -> None:
    if "cluster" in request.fixturenames:
        for node in request.getfixturevalue("cluster").nodes:
            (node.cache / "calls.jsonl").unlink(missing_ok=True)


@dataclass
class Checkout:
    """A checkout without results."""

    root: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self,
        variables: Mapping[str, str],
        options: RayOptions,
        *cells: str,
        sweep: str = "1-first",
        fresh: bool = False,
    ) -> subprocess.Popen[str]:
        """Start the driver, as the session of nox does."""
        chosen = tuple(cell(cell_id) for cell_id in cells or CELLS)
        request = Request(self.root, sweep, chosen, options, ("grpo-train-sampler",), fresh)
        path = self.root / f"request-{uuid.uuid4().hex}.json"
        path.write_text(request.to_json())
        command = [sys.executable, "-m", "pytest_trlcompat.matrix.engines", str(path)]
        driver = subprocess.Popen(
            command, env=dict(variables), cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.running.append(driver)
        return driver

    def run(
        self,
        variables: Mapping[str, str],
        options: RayOptions,
        *cells: str,
        sweep: str = "1-first",
        fresh: bool = False,
    ) -> tuple[int, str]:
        """Run the driver to its end; its exit status and output."""
        driver = self.start(variables, options, *cells, sweep=sweep, fresh=fresh)
        output, _ = driver.communicate(timeout=400)
        return driver.returncode, output

    @property
    def layout(self) -> Layout:
        return Layout(self.root)

    def state(self, cell_id: str) -> Sidecar | None:
        path = self.layout.results / f"{cell_id}.cell.json"
        return read_sidecar(path) if path.exists() else None

    def text(self, cell_id: str) -> str:
        path = self.layout.results / f"{cell_id}.jsonl"
        return path.read_text() if path.exists() else ""

    def verdicts(self, cell_id: str) -> tuple[Record, ...]:
        return tuple(read_records(self.layout.results / f"{cell_id}.jsonl"))

    def played(self, cell_id: str) -> list[Record]:
        """The records, each of which must say that this code measured it; :meth:`RayCluster.play` was told them."""
        records = self.verdicts(cell_id)
        assert {record.provenance.partition(".")[0] for record in records} == {code_digest(ROOT)}
        return list(records)

    def running_cells(self, sweep: str = "1-first") -> list[str]:
        """The cells that a command has begun and not ended."""
        Sweep(self.layout, {Sweep.VARIABLE: sweep})
        return sorted(path.name for path in (self.layout.results / ".sweeps" / sweep).glob("*"))


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    for name in ("pytest_trlcompat", "suites", "fixtures", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    made = Checkout(tmp_path)
    yield made
    for driver in made.running:
        if driver.poll() is None:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        if driver.stdout is not None:
            driver.stdout.close()


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it does not, after a long time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.1)


def processes_in(folder: Path) -> list[int]:
    """The processes of cells whose command line names a node's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes()
            if os.fsencode(str(folder)) in words and (b"cell_process" in words or b"-p\0trlcompat" in words):
                found.append(int(entry.parent.name))
    return found
