"""Many launches, mixed over strategies: ``nox -s bench -- soak [--launches 1000] [--json FILE]``.

Every launch trains for real and must give the losses of the first launch under its strategy, bitwise. Beside it counts
what a launch must not leave behind: processes, descriptors, threads and memory of the test process and of the server,
files in shared memory and in the folder for temporary files, variables, and the state of the random generators. Shared
memory is the machine's, so run nothing else at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

from benchmarks.launching.training import train  # noqa: E402 - needs the lines above
from pytest_trlcompat import _processes  # noqa: E402
from pytest_trlcompat.launch import Launcher, LaunchError  # noqa: E402
from pytest_trlcompat.strategies import DISTINCT  # noqa: E402
from pytest_trlcompat.tiny import qwen2  # noqa: E402
from suites.in_rank.models import save_model  # noqa: E402

ROWS = 10
MEMORY_SLACK = 8 << 20
"""Bytes by which a process of ours may have grown between the first row and the last."""


@dataclass
class Count:
    """What there is after a number of launches; of processes this one and its server, memory in bytes."""

    launches: int
    processes: int
    descriptors: list[int]
    threads: list[int]
    memory: list[int]
    shared_memory: int
    temporary_files: int


def count(launches: int, folder: Path) -> Count:
    """Look at this process and all its descendants.

    Args:
        folder: where their temporary files are. Those that trainings make last as long as the launcher, in a folder
            ``tmp``, and are not counted.
    """
    processes = list(family(os.getpid()))
    return Count(
        launches,
        len(processes),
        [len(os.listdir(f"/proc/{pid}/fd")) for pid in processes],
        [len(os.listdir(f"/proc/{pid}/task")) for pid in processes],
        [_private_bytes(pid) for pid in processes],
        len(os.listdir("/dev/shm")),
        sum("tmp" not in path.relative_to(folder).parts for path in folder.rglob("*")),
    )


def family(pid: int) -> Iterator[int]:
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            yield from family(child)


def _private_bytes(pid: int) -> int:
    """What would be free if the process ended: ``Private_Clean`` and ``Private_Dirty``."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there")
    parser.add_argument("--seed", type=int, default=0, help="of the order of strategies")
    parsed = parser.parse_args()
    order = random.Random(parsed.seed)
    failures: list[str] = []
    rows: list[Count] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as path, Launcher(device="software") as launch:
        folder = Path(path)
        os.environ["TMPDIR"] = tempfile.tempdir = path
        model = qwen2(directory=folder / "model")
        launch(save_model, model, strategy="single")
        expected = {name: launch(train, model, 1, strategy=name).values for name in DISTINCT}
        outside = dict(os.environ), random.getstate(), os.getcwd()
        rows.append(count(0, folder))
        print("| launches | failures | processes | descriptors | threads | memory, MiB | shared memory | files |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        print(_row(rows[0], 0), flush=True)
        for number in range(1, parsed.launches + 1):
            name = order.choice(DISTINCT)
            try:
                found = launch(train, model, 1, strategy=name).values
                if found != expected[name]:
                    failures.append(f"launch {number}, {name}: losses {found} instead of {expected[name]}")
            except LaunchError as error:
                failures.append(f"launch {number}, {name}: {error}")
            if number % max(parsed.launches // ROWS, 1) == 0:
                rows.append(count(number, folder))
                print(_row(rows[-1], len(failures)), flush=True)
        if (dict(os.environ), random.getstate(), os.getcwd()) != outside:
            failures.append("variables, random state or folder of the test process have changed")
        launch.close()
        leftovers = list(folder.glob("trlcompat-*"))
    seconds = time.monotonic() - started
    left = [pid for pid in _processes.children() if pid != os.getpid()]
    failures += [f"process {pid} was left behind" for pid in left]
    failures += [f"{path} was left behind" for path in leftovers]
    failures += _grown(rows[0], rows[-1])
    each = seconds / parsed.launches
    print(f"{parsed.launches} launches in {seconds:.0f} s, {each:.2f} s each; {len(failures)} failures")
    if parsed.json is not None:
        parsed.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "failures": failures}, indent=1))
    if failures:
        sys.exit("\n".join(failures))


def _grown(first: Count, last: Count) -> list[str]:
    """What there is more of at the end."""
    before, after = asdict(first), asdict(last)
    grown = [
        f"{name}: {before[name]} at first, {after[name]} at the end"
        for name in ("processes", "descriptors", "threads", "shared_memory", "temporary_files")
        if before[name] != after[name]
    ]
    for one, other in zip(first.memory, last.memory, strict=False):
        if other - one > MEMORY_SLACK:
            grown.append(f"memory of a process: {one} bytes at first, {other} at the end")
    return grown


def _row(row: Count, failures: int) -> str:
    memory = ", ".join(f"{size / (1 << 20):.0f}" for size in row.memory)
    descriptors, threads = (", ".join(map(str, numbers)) for numbers in (row.descriptors, row.threads))
    return (
        f"| {row.launches} | {failures} | {row.processes} | {descriptors} | {threads} | {memory} "
        f"| {row.shared_memory} | {row.temporary_files} |"
    )


if __name__ == "__main__":
    main()
