"""What loading the plugin costs: ``import pytest`` alone against ``import pytest`` and the plugin.

Runs of the two alternate, so that a machine that gets slower slows both; prints medians, their difference and ratio.

    nox -s bench -- import_time [--runs 21]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_MS = 50.0
"""What the plugin may cost beyond pytest, in milliseconds."""

# All of pytest that a run imports anyway, so that the plugin is not charged for it.
PYTEST = "import _pytest.config; _pytest.config.get_config()"
PLUGIN = f"{PYTEST}; import pytest_trlcompat.plugin"


def seconds(statements: str) -> float:
    """Time of the statements in a fresh interpreter, without the interpreter's own start."""
    code = f"import time; start = time.perf_counter(); {statements}; print(time.perf_counter() - start)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(run.stdout)


def measure(runs: int) -> dict[str, float]:
    for statements in (PYTEST, PLUGIN):  # compile and cache everything first
        seconds(statements)
    pairs = [(seconds(PYTEST), seconds(PLUGIN)) for _ in range(runs)]
    alone, together = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "runs": runs,
        "pytest_ms": round(alone, 1),
        "pytest_and_plugin_ms": round(together, 1),
        "plugin_ms": round(together - alone, 1),
        "ratio": round(together / alone, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=21)
    result = measure(parser.parse_args().runs)
    print(json.dumps(result))
    if result["plugin_ms"] > LIMIT_MS:
        print(f"the plugin costs {result['plugin_ms']} ms beyond pytest; the limit is {LIMIT_MS:g} ms", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
