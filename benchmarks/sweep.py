"""Time and peak memory of a sweep: ``python benchmarks/sweep.py [--cold] [nox arguments]``, from the checkout.

Not among ``nox -s bench``, because it takes minutes and runs nox itself. With ``--cold`` environments and results are
put aside first, so that everything is built (uv's cache is left as it is: say UV_CACHE_DIR for an empty one).
Memory is the proportional set size of nox and all its descendants, summed and sampled twice a second, so that pages
which forked ranks share count once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAUSE = 0.5
MARK = "TRLCOMPAT_BENCH"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", action="store_true", help="build every environment again")
    parsed, arguments = parser.parse_known_args()
    command = [sys.executable, "-m", "nox", *(arguments or ["-s", "matrix", "--", "--fresh"])]
    with contextlib.ExitStack() as stack:
        if parsed.cold:
            stack.enter_context(_put_aside(ROOT / ".nox" / "envs"))
        mark = f"{os.getpid()}-{time.time_ns()}"
        started = time.monotonic()
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: mark}) as running:
            peak = 0
            while running.poll() is None:
                peak = max(peak, _memory(f"{MARK}={mark}".encode()))
                time.sleep(PAUSE)
        seconds = time.monotonic() - started
    print(json.dumps({"command": command[2:], "seconds": round(seconds, 1), "peak_gib": round(peak / 2**30, 2)}))
    return running.returncode


def _memory(mark: bytes) -> int:
    """Bytes that the marked processes hold together."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                line = next(line for line in (folder / "smaps_rollup").read_text().splitlines() if "Pss:" in line)
                total += int(line.split()[1]) * 1024
    return total


@contextlib.contextmanager
def _put_aside(folder: Path) -> Iterator[None]:
    """Move a folder away for the block, and afterwards replace by it what was made meanwhile."""
    if not folder.exists():
        yield
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        folder.rename(Path(temporary) / folder.name)
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            (Path(temporary) / folder.name).rename(folder)


if __name__ == "__main__":
    sys.exit(main())
