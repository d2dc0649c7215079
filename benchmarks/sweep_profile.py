"""Where the processor seconds of a cell go: ``nox -s bench -- sweep_profile [--cell CELL] [pytest arguments]``.

Runs the suites of a cell as a sweep does, in the environment of the running interpreter, and samples the Python stack
of every process every 10 ms of its processor time: pytest's, the launch server's, and each rank's. What runs in a
sample is told from the functions on the stack, see :func:`kind_of`. Each sample is one byte in a file that all
processes append to, so that nothing is lost when a rank ends by ``os._exit``. What is not Python (a compiler, say) has
no samples, and is the difference to the processor time of the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
FILE = "TRLCOMPAT_BENCH_SAMPLES"
"""The variable that names the file of the samples."""
INTERVAL = 0.01
"""Seconds of processor time between two samples of a process."""
KINDS = {
    "I": "imports",
    "C": "collecting tests",
    "B": "building models, tokenizers and trainers",
    "G": "generation",
    "T": "training, and what a suite does in a rank",
    "R": "reference",
    "N": "its neighbours",
    "V": "comparing",
    "L": "launching: the server, forks, messages",
    "J": "judging, and the rest of pytest",
}
"""By the byte of a sample."""
_BUILDING = ("from_pretrained", "prepare", "initialize", "_prepare_deepspeed", "save_pretrained", "save_model")
_SITE = """import importlib.util, sys
spec = importlib.util.spec_from_file_location("_trlcompat_profile", {path!r})
module = importlib.util.module_from_spec(spec)
sys.modules["_trlcompat_profile"] = module
spec.loader.exec_module(module)
module.sample_this_process()
"""


def sample_this_process() -> None:
    """Sample this process, and those that it forks."""
    descriptor = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def sample(number: int, frame: FrameType | None) -> None:
        os.write(descriptor, kind_of(frame).encode())

    def begin() -> None:
        # Timers are not inherited. Calls that it interrupts go on, as they would without it.
        signal.signal(signal.SIGPROF, sample)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)

    begin()
    os.register_at_fork(after_in_child=begin)


def kind_of(frame: FrameType | None) -> str:
    """What the functions on a stack are for, a letter of :data:`KINDS`: the most specific of all."""
    seen: set[str] = set()
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith("<frozen importlib"):
            seen.add("I")
        elif "/pytest_trlcompat/" in file:
            seen.add(_ours(file.rpartition("/pytest_trlcompat/")[2], name))
        elif file.endswith("/generation/utils.py"):
            seen.add("G")
        elif name in _BUILDING or (name == "__init__" and ("_trainer.py" in file or file.endswith("trainer.py"))):
            seen.add("B")
        elif name in ("pytest_collection", "perform_collect", "pytest_cmdline_parse"):
            seen.add("C")
        elif "/suites/in_rank/" in file:
            seen.add("T")
        frame = frame.f_back
    return next((kind for kind in "INRVGBTLC" if kind in seen), "J")


def _ours(path: str, name: str) -> str:
    if name == "neighbours":
        return "N"
    if path.startswith("reference/") or (name == "computed" and path.startswith("conformance/")):
        return "R"
    if path.startswith("tiny/"):
        return "B"
    if path == "conformance/comparison.py" or name in ("compare", "differing"):
        return "V"
    if path == "conformance/driver.py" and name == "_compare_row":
        return "T"
    return "L" if path.startswith("launch/") else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cell", help="whose tests run; the newest by default. Its environment must be the running one"
    )
    parsed, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="trlcompat-profile-") as folder:
        started = time.monotonic()
        status = _run(Path(folder), _tests(parsed.cell), arguments)
        wall = time.monotonic() - started
        samples = Counter((Path(folder) / "samples").read_bytes().decode())
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = spent.ru_utime + spent.ru_stime
    print(json.dumps({"wall": round(wall, 1), "processor": round(total, 1), "samples": samples}))
    print("\n".join(table(samples, total, wall)))
    return status


def table(samples: Counter[str], total: float, wall: float) -> list[str]:
    """Lines of Markdown: seconds and shares of the processor time, and for how long the processors had nothing.

    Args:
        total: processor seconds of all processes.
    """
    seconds = {name: samples[kind] * INTERVAL for kind, name in KINDS.items()}
    seconds["not sampled"] = max(total - sum(seconds.values()), 0.0)
    lines = ["| what | processor seconds | share |", "| --- | --: | --: |"]
    lines += [f"| {name} | {value:.1f} | {value / total:.1%} |" for name, value in seconds.items()]
    lines.append(f"| all | {total:.1f} | 100 % |")
    cores = len(os.sched_getaffinity(0))
    lines.append(f"| waiting: {wall:.1f} s on {cores} cores, less the above | {wall * cores - total:.1f} | |")
    return lines


def _tests(cell_id: str | None) -> str:
    from pytest_trlcompat.matrix.layout import Layout
    from pytest_trlcompat.matrix.parsing import read_matrix
    from pytest_trlcompat.matrix.suite_choice import chosen_tests

    matrix = read_matrix(Layout(ROOT).matrix)
    default = matrix.default()
    cell = next((cell for cell in default if cell.id == cell_id), None) if cell_id else default[0]
    if cell is None:
        raise SystemExit(f"{cell_id} is no default cell; there are {', '.join(cell.id for cell in default)}")
    return chosen_tests(cell, default, full=False)


def _run(folder: Path, tests: str, arguments: Sequence[str]) -> int:
    (folder / "sitecustomize.py").write_text(_SITE.format(path=str(Path(__file__).resolve())), encoding="utf-8")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        **offline,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        FILE: str(folder / "samples"),
    }
    command = [sys.executable, "-m", "pytest", "-p", "trlcompat", "-p", "no:cacheprovider", "-m", tests, "-q"]
    return subprocess.run([*command, *arguments, str(ROOT / "suites")], env=variables, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
