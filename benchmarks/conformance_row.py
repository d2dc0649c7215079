"""One row of conformance in this process, for ``passes.py``: what a rank does, from its setting to the comparison.

    python benchmarks/passes.py --call benchmarks.conformance_row:compared sft default

In an environment with the stack. The words are a trainer, and the name of a row that one process trains with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from pytest_trlcompat.conformance import driver, rows
from pytest_trlcompat.conformance.training import conformance_model

__all__ = ["compared"]


def compared(words: Sequence[str]) -> None:
    """Train with a row, and compare."""
    trainer, name = words
    row = rows.load(trainer)[f"single-{name}"]
    with tempfile.TemporaryDirectory() as folder:
        model = conformance_model(Path(folder))
        _ = model.path  # saves it
        result = driver.compare_with_reference(trainer, "upstream", model, {row.name: row.setting})
    print(result)
