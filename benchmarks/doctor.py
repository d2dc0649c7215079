"""What an answer of ``trlcompat doctor`` takes, the interpreter's start included, beside ``python -c pass``.

Runs of the two alternate; prints medians of the wall clock and of processor time, which other work on the machine
changes less. With another checkout its doctor runs in turns with them, and the ratio of this one to it is printed.

    nox -s bench -- doctor [--runs 11] [--before CHECKOUT]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 1.0
"""What an answer may take."""

NOTHING = ("-c", "pass")
PINS = ("-m", "pytest_trlcompat", "doctor", "trl==0.15.2", "transformers==4.48.3")


def seconds(*arguments: str, bytecode: str, checkout: Path = ROOT) -> tuple[float, float]:
    """Of the wall clock, and of the processor.

    Args:
        bytecode: a folder for it. Without one, whoever has Python write none beside sources would measure how long it
            takes to compile them.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": bytecode}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, *arguments]
    subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.DEVNULL, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parsed = parser.parse_args()
    checkouts = [ROOT, *([parsed.before.resolve()] if parsed.before else [])]
    with tempfile.TemporaryDirectory() as folder:
        time_of = functools.partial(seconds, bytecode=folder)
        for checkout in checkouts:
            time_of(*PINS, checkout=checkout)  # compile and cache everything first
        rounds = [
            (time_of(*NOTHING), *(time_of(*PINS, checkout=each) for each in checkouts)) for _ in range(parsed.runs)
        ]
    wall, processor = (
        [1000 * statistics.median(times[side][clock] for times in rounds) for side in (0, 1)] for clock in (0, 1)
    )
    result = {
        "runs": parsed.runs,
        "python_ms": round(wall[0], 1),
        "doctor_ms": round(wall[1], 1),
        "python_processor_ms": round(processor[0], 1),
        "doctor_processor_ms": round(processor[1], 1),
    }
    if parsed.before:
        processor_before = 1000 * statistics.median(times[2][1] for times in rounds)
        result |= {
            "before_processor_ms": round(processor_before, 1),
            "ratio": round(processor[1] / processor_before, 3),
        }
    print(json.dumps(result))
    if wall[1] > 1000 * LIMIT_SECONDS:
        print(f"an answer took {wall[1]:.0f} ms; the limit is {1000 * LIMIT_SECONDS:g} ms", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
