"""What an answer of ``trlcompat doctor`` takes, the interpreter's start included, beside ``python -c pass``.

Runs of the two alternate; prints medians of the wall clock and of processor time, which other work on the machine does
not change.

    nox -s bench -- doctor [--runs 11]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 1.0
"""What an answer may take."""

NOTHING = ("-c", "pass")
PINS = ("-m", "pytest_trlcompat", "doctor", "trl==0.15.2", "transformers==4.48.3")


def seconds(*arguments: str) -> tuple[float, float]:
    """Of the wall clock, and of the processor."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    seconds(*PINS)  # compile and cache everything first
    pairs = [(seconds(*NOTHING), seconds(*PINS)) for _ in range(runs)]
    wall, processor = (
        [1000 * statistics.median(pair[side][clock] for pair in pairs) for side in (0, 1)] for clock in (0, 1)
    )
    result = {
        "runs": runs,
        "python_ms": round(wall[0], 1),
        "doctor_ms": round(wall[1], 1),
        "python_processor_ms": round(processor[0], 1),
        "doctor_processor_ms": round(processor[1], 1),
    }
    print(json.dumps(result))
    if wall[1] > 1000 * LIMIT_SECONDS:
        print(f"an answer took {wall[1]:.0f} ms; the limit is {1000 * LIMIT_SECONDS:g} ms", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
