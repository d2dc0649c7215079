"""False alarms of conformance: rows that are right are held against the reference with other seeds.

    nox -s bench -- other_seeds [--runs 1000] [--subject upstream]

Model and data of each run have another seed than in the suites. Each row that is tried in one process is run in turn,
and again with the next seed, until there are enough runs in which something was compared. A difference that no known
issue explains is an alarm, which is printed; there should be none.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_trlcompat.catalog.verdict import Verdict  # noqa: E402
from pytest_trlcompat.conformance import rows  # noqa: E402
from pytest_trlcompat.conformance.training import conformance_model  # noqa: E402
from pytest_trlcompat.launch import Launcher, LaunchError  # noqa: E402
from pytest_trlcompat.plugin.judging import Absent, Finding, Untestable  # noqa: E402
from pytest_trlcompat.stack import TELLING  # noqa: E402
from suites.conformance.trainings import ConformanceTrainings  # noqa: E402
from suites.launches import LaunchCache  # noqa: E402

__all__ = ["main"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="in which something was compared")
    parser.add_argument("--subject", choices=["upstream", "corrected"], default="upstream")
    arguments = parser.parse_args()
    print(", ".join(f"{name} {metadata.version(name)}" for name in TELLING), arguments.subject, flush=True)
    started, counts = time.monotonic(), Counter[str]()
    trainers = Counter[str]()
    for trainer, label, seed, found in itertools.islice(_runs(arguments.subject), arguments.runs):
        counts[found.verdict.value] += 1
        trainers[trainer] += 1
        if found.verdict not in (Verdict.OK, Verdict.BLOCKED):
            print(f"{trainer} {label}, seed {seed}: {found.verdict.value}: {dict(found.evidence)}", flush=True)
    alarms = counts.total() - counts[Verdict.OK.value] - counts[Verdict.BLOCKED.value]
    print(f"{counts.total()} runs in {time.monotonic() - started:.0f} s: {dict(trainers)}")
    print(f"{counts[Verdict.OK.value]} ok, {counts[Verdict.BLOCKED.value]} explained by known issues, {alarms} alarms")
    return int(alarms > 0)


def _runs(subject: str) -> Iterator[tuple[str, str, int, Finding]]:
    """Trainer, label, seed, and what was found."""
    for seed in itertools.count(1):
        with tempfile.TemporaryDirectory() as folder, Launcher() as launcher:
            trainings = ConformanceTrainings(LaunchCache(launcher), conformance_model(folder, seed), seed=seed)
            tried = 0
            for trainer in rows.TRAINERS:
                for label, row in rows.load(trainer).items():
                    if row.strategy != "single" or row.added:
                        continue
                    try:
                        found = trainings.judge(subject, label, trainer)
                    except (Absent, Untestable):
                        continue
                    except LaunchError as error:
                        found = Finding(Verdict.ERROR, {"error": str(error)})
                    if found.verdict is not Verdict.ABSENT:
                        tried += 1
                        yield trainer, label, seed, found
            if not tried:
                return


if __name__ == "__main__":
    sys.exit(main())
