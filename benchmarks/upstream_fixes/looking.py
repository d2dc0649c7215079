"""Train with the rows of a trainer's conformance suite, and write what each shows. Runs in the environment of a stack.

    python -m benchmarks.upstream_fixes.looking grpo RESULT.json --ranks

No catalogue is asked: what a known issue explains is shown like anything else.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_trlcompat.bisect.observation import fingerprint_of
from pytest_trlcompat.conformance import driver, rows
from pytest_trlcompat.conformance.training import conformance_model
from pytest_trlcompat.launch import Launcher, LaunchError
from suites.conformance.row_choice import launch_of
from suites.in_rank import models
from suites.launches import distinct
from suites.sharding.trainings import WORLD_SIZE

__all__ = ["launches_of"]

TIMEOUT_S = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=rows.TRAINERS)
    parser.add_argument("result", type=Path)
    parser.add_argument("--ranks", action="store_true", help="rows with several ranks, too")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="these alone, by their labels")
    options = parser.parse_args()
    shown: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Launcher(device="software", timeout=TIMEOUT_S) as launch:
        model = conformance_model(folder)
        launch(models.save_model, model, strategy="single")
        for together in launches_of(options.trainer, ranks=options.ranks, wanted=options.rows):
            shown |= _shown(launch, options.trainer, model, together)
    options.result.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    return 0


def launches_of(trainer: str, *, ranks: bool, wanted: Sequence[str] | None = None) -> list[list[rows.Row]]:
    """The rows of each launch, those with Liger aside.

    Args:
        ranks: also those with several ranks.
        wanted: labels of rows; ``None``: all.
    """
    launches: dict[str, list[rows.Row]] = {}
    for label, row in rows.load(trainer).items():
        if row.added or (wanted is not None and label not in wanted):
            continue
        if ranks or row.strategy == "single" or wanted is not None:
            launches.setdefault(launch_of(trainer, label).rows[0].label, []).append(row)
    return list(launches.values())


def _shown(launch: Launcher, trainer: str, model: Any, together: Sequence[rows.Row]) -> dict[str, Any]:
    """What rows of one launch show, by label; each in a launch of its own where they end the one that they share."""
    strategy = together[0].strategy
    settings = {row.name: row.setting for row in together}
    partly = [row.name for row in together if row.is_of_array]
    size = 1 if strategy == "single" else WORLD_SIZE
    try:
        ranks = launch(
            *(driver.compare_with_reference, trainer, "upstream", model, settings, 0, partly),
            strategy=strategy,
            world_size=size,
            sharded=False,
        ).values
    except LaunchError as error:
        if len(together) == 1:
            said = str(error)
            return {together[0].label: {"failure": str(fingerprint_of(said, said.splitlines()[0]))}}
        return {label: said for row in together for label, said in _shown(launch, trainer, model, [row]).items()}
    return {row.label: _summary([rank[row.name] for rank in ranks], row) for row in together}


def _summary(ranks: Sequence[Mapping[str, Any]], row: rows.Row) -> dict[str, Any]:
    first = ranks[0]
    if first["unknown"] and not row.is_of_array:
        return {"absent": first["unknown"]}
    if first.get("lacking"):
        return {"absent": [first["lacking"]]}
    failures = distinct(rank["failure"] for rank in ranks)
    if failures:
        return {"failure": str(fingerprint_of(failures[0], failures[0].splitlines()[0]))}
    differing: dict[str, Any] = {}
    for each in first["differences"]:
        numbers = {name: each[name] for name in ("where", "expected", "found", "said") if name in each}
        differing.setdefault(each["stage"], numbers)
    return {"differing": differing} if differing else {}


if __name__ == "__main__":
    sys.exit(main())
