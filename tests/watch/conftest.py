"""A small checkout with a matrix, and a small index in place of the real one; uv is the real one."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix import locks
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.watch.layout import WatchLayout

from .small_index import RELEASES, serving

MATRIX = """\
[defaults]
python = "3.11"
pins = { torch = "2.0.0" }
stack = ["torch", "transformers", "trl", "accelerate", "peft", "datasets"]
harness = []

[torch]
"2.0.0" = 2026-05-01

[[cell]]
pins = { trl = "1.0.0", transformers = "5.0.0" }
tags = ["default"]
date = 2026-06-01
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The pages that were asked for of the small index, which uv and the watch use."""
    with serving(RELEASES) as (address, asked):
        for name in ("PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("UV_DEFAULT_INDEX", address)
        # A folder of wheels that may hold torch: no build of it is then looked for at its own index.
        monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path_factory.mktemp("wheels")))
        monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
        monkeypatch.setattr(locks, "torch_backend", lambda environ: [])
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("uv")))
        yield asked


@pytest.fixture
def checkout(tmp_path: Path, asked: list[str]) -> WatchLayout:
    """With one cell and its lock."""
    (tmp_path / "fixtures" / "locks").mkdir(parents=True)
    (tmp_path / "fixtures" / "matrix.toml").write_text(MATRIX)
    layout = Layout(tmp_path)
    matrix = read_matrix(layout.matrix)
    lock = locks.renew(matrix, matrix.cells[0], layout)
    # Its releases were measured, in a cell that the matrix has no more.
    verdicts = {("grpo-x", "upstream", "ddp"): Verdict.OK}
    measured = MeasuredCell("before", stack.versions_of(lock.packages), verdicts, "2026-06-01")
    write_whole(layout.evidence, Evidence("2026-06-01", (measured,)).to_json())
    return WatchLayout(tmp_path, tmp_path / "build" / "watch")


@pytest.fixture
def matrix(checkout: WatchLayout) -> Matrix:
    return read_matrix(checkout.matrix)


@pytest.fixture
def today() -> datetime.date:
    return datetime.date(2026, 7, 1)
