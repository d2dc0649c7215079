"""The faults of ``nox -s bench -- conformance_faults``: that each can still be planted, and how one is looked for."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from pytest_trlcompat.conformance import rows

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from conformance_faults import TRAINERS, Fault, read_faults  # type: ignore[import-not-found]

CASES = [(trainer, number) for trainer in TRAINERS for number in range(len(read_faults(trainer)[1]))]


@pytest.mark.parametrize("trainer, number", CASES)
def test_a_fault_can_be_planted(trainer: str, number: int) -> None:
    release, faults = read_faults(trainer)
    fault = faults[number]
    assert rows.load(trainer)[f"single-{fault.row}"].strategy == "single"
    assert all(fault.stages)
    if metadata.version("trl") != release:
        pytest.skip(f"the faults are for trl {release}")
    source = Path(
        str(metadata.distribution("trl").locate_file(f"trl/trainer/{trainer.removeprefix('first_')}_trainer.py"))
    ).read_text()
    assert fault.plant(source) != source


def test_a_fault_that_cannot_be_planted_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="this release of trl has nowhere: 'a sign'"):
        Fault("a sign", "another", "default", ["logs"]).plant("def compute_loss(): ...")
