"""What a sweep costs on many nodes: ``python benchmarks/scale.py [--cells 10000] [--nodes 10 100 1000]``.

A model: cells are given to free slots, the dearest first, as the engine does; a slot first builds the environment of
its cell; the driver handles all verdicts of all cells, one after the other. Its constants are what was measured on few
nodes, and are options. ``--measure CELLS VERDICTS``, in an environment with ``ray``, measures the driver's: cells whose
tasks do nothing but yield verdicts, on a cluster of this machine alone.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_trlcompat.matrix.layout import Layout  # noqa: E402 - needs sys.path
from pytest_trlcompat.matrix.shards import costs  # noqa: E402


@dataclass(frozen=True)
class Constants:
    """What was measured; seconds and bytes.

    Attributes:
        build: of an environment, with a filled uv cache.
        driver_cell, driver_verdict: of the driver's processor, for each cell and for each verdict.
        verdicts, verdict_bytes: of a cell.
        environment_bytes: that an environment adds to uv's cache on the disk.
        project_bytes: of this project's files, as they are sent.
        package_bytes: of all packages of a cell, as they are downloaded.
        new_package_bytes: of those that one more cell adds to a node's cache.
    """

    slots: int
    build: float
    driver_cell: float
    driver_verdict: float
    verdicts: int
    verdict_bytes: int
    environment_bytes: float
    project_bytes: float
    package_bytes: float
    new_package_bytes: float


@dataclass(frozen=True)
class Outcome:
    """Of one size of cluster; hours, and bytes."""

    nodes: int
    hours: float
    ideal: float
    driver: float
    index: float
    index_rate: float
    head: float
    disk: float


def simulate(seconds: Sequence[float], nodes: int, known: Constants) -> Outcome:
    """Give the cells to free slots, the dearest first."""
    slots = [(0.0, number) for number in range(nodes * known.slots)]
    heapq.heapify(slots)
    last = 0.0
    for cell in sorted(seconds, reverse=True):
        free, number = heapq.heappop(slots)
        end = free + known.build + cell
        last = max(last, end)
        heapq.heappush(slots, (end, number))
    driver = len(seconds) * (known.driver_cell + known.verdicts * known.driver_verdict)
    used = min(nodes, len(seconds))
    each = len(seconds) / used
    index = used * (known.package_bytes + max(each - 1, 0) * known.new_package_bytes)
    # Whoever handles all verdicts cannot be faster than that takes.
    whole = max(last, driver)
    return Outcome(
        nodes,
        whole / 3600,
        sum(seconds) / (nodes * known.slots) / 3600,
        driver / whole,
        index,
        index / whole,
        used * known.project_bytes + len(seconds) * known.verdicts * known.verdict_bytes,
        each * known.environment_bytes + known.package_bytes + each * known.new_package_bytes,
    )


def measure(cells: int, verdicts: int) -> dict[str, Any]:
    """Seconds of the driver's processor for cells whose tasks yield verdicts at once."""
    import ray

    from pytest_trlcompat.catalog.verdict import Record, Verdict
    from pytest_trlcompat.matrix.cells import Cell, Matrix
    from pytest_trlcompat.matrix.engines import messages, ray_streams
    from pytest_trlcompat.matrix.engines.driver import Driver
    from pytest_trlcompat.matrix.engines.nodes import Nodes
    from pytest_trlcompat.matrix.results import Sidecar
    from pytest_trlcompat.matrix.sweep import Sweep

    def events(task: messages.CellTask) -> Iterator[messages.Event]:
        yield messages.Started("node", "host")
        position = 0
        for number in range(verdicts):
            evidence = {"padding": "x" * 400}
            record = Record("issue", "upstream", f"s{number}", Verdict.OK, Verdict.OK, evidence, 1.0)
            line = record.to_json() + "\n"
            yield messages.Verdicts(position, line)
            position += len(line)
        yield messages.State(Sidecar(task.id, {"trl": "1"}, "tested", "measured").to_json())
        yield messages.Ended(0, "")

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
    ray_streams._cell = ray.remote(num_returns="streaming", max_retries=0)(events)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("pytest_trlcompat", "suites", "fixtures"):
            (Path(folder) / name).mkdir()
        sweep = Sweep(Layout(Path(folder)), {Sweep.VARIABLE: "measured"})
        template = messages.CellTask("", {}, None, None, "measured")
        matrix = Matrix("3.11", {}, ("trl",), (), (), 3)
        chosen = [Cell({"trl": f"0.{number}"}) for number in range(cells)]
        said: list[str] = []
        streams = ray_streams.RayStreams(1, 1)
        driver = Driver(matrix, sweep, streams, template, {}, Nodes((), "cells"), said.append, limit=LIMIT)
        began, processor = time.monotonic(), time.process_time()
        driver.run(chosen, fresh=True)
        seconds, busy = time.monotonic() - began, time.process_time() - processor
        assert sum("all as predicted" in line for line in said) == cells
    ray.shutdown()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "cells": cells,
        "verdicts": verdicts,
        "seconds": round(seconds, 1),
        "processor": round(busy, 2),
        "peak_mib": round(peak / 2**20),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs=2, type=int, metavar=("CELLS", "VERDICTS"))
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--slots", type=int, default=2, help="cells at a time on a node")
    parser.add_argument("--build", type=float, default=BUILD)
    parser.add_argument("--driver-cell", type=float, default=DRIVER_CELL)
    parser.add_argument("--driver-verdict", type=float, default=DRIVER_VERDICT)
    parser.add_argument("--verdicts", type=int, default=151)
    parser.add_argument("--verdict-bytes", type=int, default=VERDICT_BYTES)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return 0
    known = Constants(
        options.slots,
        options.build,
        options.driver_cell,
        options.driver_verdict,
        options.verdicts,
        options.verdict_bytes,
        ENVIRONMENT_BYTES,
        PROJECT_BYTES,
        PACKAGE_BYTES,
        NEW_PACKAGE_BYTES,
    )
    seconds = list(itertools.islice(itertools.cycle(sorted(costs(Layout(ROOT)).values())), options.cells))
    print(
        f"{options.cells} cells of {sum(seconds) / len(seconds):.0f} s in the mean, {options.slots} at a time on a node"
    )
    titles = ["nodes", "hours", "without builds and waiting", "driver busy", "packages, GB, unpacked", "MB/s"]
    titles += ["sent and received by the driver, GB", "disk of a node, GB"]
    print(f"| {' | '.join(titles)} |")
    print("| --- " * len(titles) + "|")
    for nodes in options.nodes:
        found = simulate(seconds, nodes, known)
        print(
            f"| {nodes} | {found.hours:.2f} | {found.ideal:.2f} | {found.driver:.1%} | {found.index / 1e9:.0f} | "
            f"{found.index_rate / 1e6:.1f} | {found.head / 1e9:.2f} | {found.disk / 1e9:.1f} |"
        )
    return 0


LIMIT = 2 * 2000 + 64
"""Cells that the driver submits at a time, where 1,000 nodes have room for 2,000."""

# Measured as benchmarks/README.md says.
BUILD = 9.0
DRIVER_CELL = 0.0045
DRIVER_VERDICT = 0.00038
VERDICT_BYTES = 532
ENVIRONMENT_BYTES = 3.2e6
PROJECT_BYTES = 1.5e6
PACKAGE_BYTES = 1.28e9
NEW_PACKAGE_BYTES = 49e6

if __name__ == "__main__":
    sys.exit(main())
