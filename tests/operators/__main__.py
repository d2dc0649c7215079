"""Try the operators of PyTorch's database: one JSON line for each operator and dtype, on standard output."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pytest_trlcompat.accelerator import activate
from tests.operators.isolation import Ended, run_isolated

LIMIT = float(os.environ.get("LIMIT", "60"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--samples", type=int, default=4)
    asked = parser.parse_args()
    activate(devices=2)
    import torch

    from tests.operators.trial import operators, try_operator

    DTYPES = {n: getattr(torch, n) for n in ("float32", "bfloat16", "float16", "int64", "bool", "complex64")}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    database = operators()
    names = asked.names or list(database)
    dtypes = asked.dtype or list(DTYPES)
    tasks = []
    for name in names:
        supported = database[name].supported_dtypes("cpu")
        kept = [dtype for dtype in dtypes if DTYPES[dtype] in supported]
        if kept:
            tasks.append((name, kept))
    gc.collect()
    gc.freeze()

    def work(task):
        name, dtypes = task
        warnings.simplefilter("ignore")
        for dtype in dtypes:
            t = time.monotonic()
            try:
                found = try_operator(database[name], DTYPES[dtype], samples=asked.samples or None)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            yield json.dumps({"operator": name, "dtype": dtype, "difference": found, "seconds": round(time.monotonic() - t, 3)})

    def again(ended):
        name, dtypes = ended.task
        rest = dtypes[len(ended.lines) + 1 :]
        return (name, rest) if rest else None

    for ended in run_isolated(tasks, work, workers=asked.workers, limit=LIMIT, again=again):
        for line in ended.lines:
            print(line)
        if ended.failure:
            name, dtypes = ended.task
            print(json.dumps({"operator": name, "dtype": dtypes[len(ended.lines)], "difference": None, "failure": ended.failure}))
        sys.stdout.flush()


main()
