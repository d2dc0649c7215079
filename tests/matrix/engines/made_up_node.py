"""A node's folder with the environment of one cell, whose ``python`` acts as pytest: see :data:`..made_up.PYTEST`.

Everything else is real: the files as they are sent, the cell's process, its lock, and what watches it.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_trlcompat.catalog.verdict import Record
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.engines.messages import CellTask
from pytest_trlcompat.matrix.engines.node import NodeLayout
from pytest_trlcompat.matrix.environments import name_of
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import known
from pytest_trlcompat.matrix.parsing import read_matrix
from tests.matrix.made_up import PYTEST, put_distributions

ROOT = Path(__file__).resolve().parents[3]
CELLS = ("trl0.15.2-tf4.48.3", "trl0.14.0-tf4.52.4", "trl1.16.0-tf5.23.0")


def cell(cell_id: str = CELLS[0]) -> Cell:
    return read_matrix(Layout(ROOT).matrix).cell(cell_id)


def task(cache: Path, cell_id: str = CELLS[0], **more: object) -> CellTask:
    """A cell as a driver would submit it."""
    chosen = cell(cell_id)
    values = {"sweep": "first", "issues": ("grpo-train-sampler",), "cache": str(cache), "own_caches": False, **more}
    return CellTask(cell_id, dict(chosen.pins), chosen.date and chosen.date.isoformat(), chosen.python, **values)  # type: ignore[arg-type]


class Node:
    """A node whose environments are made up."""

    def __init__(self, cache: Path, cells: Sequence[str] = CELLS) -> None:
        self.cache = cache
        layout = NodeLayout(ROOT, cache, cache)
        for cell_id in cells:
            lock = known(read_matrix(layout.matrix), cell(cell_id), layout)
            assert lock is not None
            python = layout.environments / name_of(lock, layout) / "bin" / "python"
            python.parent.mkdir(parents=True)
            put_distributions(python.parents[1], lock.packages)
            text = PYTEST.format(python="", folder=str(cache), project=str(ROOT))
            python.write_text(f"#!{sys.executable}\n" + text.partition("\n")[2])
            python.chmod(python.stat().st_mode | stat.S_IXUSR)
            (python.parents[1] / "trlcompat-built.json").write_text("{}")

    def play(self, *records: Record, status: int = 0, seconds: float = 0) -> None:
        """Set what its pytest does."""
        lines = [record.to_json() for record in records]
        play = {"lines": lines, "status": status, "seconds": seconds, "provenance": ""}
        (self.cache / "play.json").write_text(json.dumps(play))

    @property
    def calls(self) -> list[dict[str, object]]:
        path = self.cache / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
