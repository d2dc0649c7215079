"""Try the operators of PyTorch's database on the software accelerator: JSON lines on standard output.

The first line names the torch, the others are outcomes (see listing.py). By hand, in an environment with torch:

    python -m tests.operators sgn fft.hfft --dtype complex64
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pytest_trlcompat.accelerator import activate

from .isolation import Ended, run_isolated
from .listing import DTYPES, Outcome

SAMPLES = 4
LIMIT = 120.0
"""Seconds for an operator in all its dtypes; the slowest takes 20 on a busy machine."""


@dataclass(frozen=True)
class Task:
    """An operator in some dtypes, in this order."""

    operator: str
    dtypes: tuple[str, ...]
    cpu_alone: bool = False
    """Only look whether the CPU can do it: the device's process did not survive."""
    failure: str = ""
    """How that process ended."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.operators", description=__doc__)
    parser.add_argument("operators", nargs="*", help="names as the database has them; default: all")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: all")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each operator, at most; 0 for all")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for each operator")
    options = parser.parse_args()

    activate(devices=2)
    import torch

    from .trial import operators, try_operator

    database = operators()
    unknown = sorted(set(options.operators) - set(database))
    if unknown:
        parser.error(f"torch {torch.__version__} has no operators {', '.join(unknown)}")

    def work(task: Task) -> Iterator[str | None]:
        for dtype in task.dtypes:
            found = try_operator(
                database[task.operator],
                getattr(torch, dtype),
                samples=options.samples or None,
                cpu_alone=task.cpu_alone,
            )
            yield found.text if found else None

    # A process that is forked must not inherit threads; those of a backward pass are started in it alone.
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _tell({"torch": torch.__version__})
    tasks = list(_tasks(database, options.operators or database, options.dtype or DTYPES))
    gc.collect()
    gc.freeze()  # or each process would copy, page by page, what its garbage collector looks at
    for ended in run_isolated(tasks, work, workers=options.workers, limit=options.limit, after_failure=_what_remains):
        for outcome in _outcomes(ended):
            _tell(dataclasses.asdict(outcome))


def _tasks(database: dict[str, Any], names: Iterable[str], dtypes: Iterable[str]) -> Iterator[Task]:
    """What the CPU supports."""
    for name in names:
        supported = {str(dtype).removeprefix("torch.") for dtype in database[name].supported_dtypes("cpu")}
        kept = tuple(dtype for dtype in dtypes if dtype in supported)
        if kept:
            yield Task(name, kept)


def _what_remains(ended: Ended[Task]) -> Iterator[Task]:
    """After a process has died: the CPU in the dtype in which it did, and the other dtypes."""
    task = ended.task
    if task.cpu_alone:
        return
    dtype, *rest = task.dtypes[len(ended.reported) :]
    yield Task(task.operator, (dtype,), cpu_alone=True, failure=str(ended.failure))
    if rest:
        yield Task(task.operator, tuple(rest))


def _outcomes(ended: Ended[Task]) -> Iterator[Outcome]:
    task = ended.task
    if not task.cpu_alone:
        for dtype, found in zip(task.dtypes, ended.reported, strict=False):
            yield Outcome(task.operator, dtype, found)
    elif ended.failure is not None:
        yield Outcome(task.operator, task.dtypes[0], f"the CPU itself fails: {ended.failure}")
    else:
        yield Outcome(task.operator, task.dtypes[0], None, task.failure)


def _tell(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
