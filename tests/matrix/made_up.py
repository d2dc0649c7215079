"""A fake checkout with one cell.

The environment is a fake whose ``python`` acts as pytest: it appends given verdicts and sleeps for a given time.
"""

from __future__ import annotations

import datetime
import json
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix import environments, torch_builds
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.job import run_cell
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.results import Outcome, Sidecar, read_sidecar
from pytest_trlcompat.matrix.sweep import Sweep

CELL = Cell({"trl": "0.15.2", "transformers": "4.48.3"})
MATRIX = Matrix("3.11", {"torch": "2.13.0"}, ("torch", "trl"), (), (), 3)
LOCK = Lock(CELL.id, datetime.date(2025, 2, 28), "3.11", {"torch": "2.13.0", "trl": "0.15.2"}, "x")

OK = Record("issue-a", "corrected", "single", Verdict.OK, Verdict.OK, {}, 0.5)
BROKEN = Record("issue-a", "upstream", "single", Verdict.BROKEN, Verdict.BROKEN, {"n": 1}, 0.5)
SURPRISE = Record("issue-a", "upstream", "ddp", Verdict.OK, Verdict.BROKEN)
CRASH = Record("issue-b", "upstream", "ddp", Verdict.ERROR, None)

PROJECT = Path(__file__).resolve().parents[2]

PYTEST = """#!{python}
import json, os, pathlib, sys, time
here = pathlib.Path({folder!r})
play = json.loads((here / "play.json").read_text())
results = pathlib.Path(sys.argv[sys.argv.index("--trlcompat-results") + 1])
sys.path.insert(0, {project!r})
from pytest_trlcompat import _provenance
code = _provenance.code_digest(pathlib.Path(os.environ.get("PYTHONPATH", here)))
provenance = str(_provenance.Provenance(code, _provenance.of_environment(pathlib.Path(__file__).parents[1])))
with open(here / "calls.jsonl", "a") as file:
    before = results.read_text() if results.exists() else None
    print(json.dumps({{"arguments": sys.argv[1:], "environ": dict(os.environ), "before": before}}), file=file)
with open(results, "a") as file:
    for line in play["lines"]:
        print(json.dumps({{**json.loads(line), "provenance": play["provenance"] or provenance}}), file=file)
try:
    time.sleep(play["seconds"])
except KeyboardInterrupt:
    sys.exit(2)
if play["status"] < 0:
    os.kill(os.getpid(), -play["status"])
sys.exit(play["status"])
"""


def put_distributions(environment: Path, packages: Mapping[str, str]) -> None:
    """The metadata of distributions, as an installer leaves it in an environment."""
    site_packages = environment / "lib" / "python3.11" / "site-packages"
    for name, version in packages.items():
        folder = site_packages / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def records_in(text: str) -> list[Record]:
    """The verdicts of a results file, each a whole line."""
    assert text.endswith("\n")
    return [Record.from_json(line) for line in text.splitlines()]


@dataclass
class Stage:
    """A checkout in a temporary folder, whose cell has a fake environment."""

    root: Path
    said: list[str] = field(default_factory=list)

    def play(self, *records: Record, status: int = 0, seconds: float = 0, provenance: str = "") -> None:
        """Set what the fake pytest does.

        Args:
            provenance: what the verdicts say they were measured with; empty: this code and this environment.
        """
        lines = [record.to_json() for record in records]
        play = {"lines": lines, "status": status, "seconds": seconds, "provenance": provenance}
        (self.root / "play.json").write_text(json.dumps(play))

    def run(self, sweep: str = "first", **options: Any) -> Outcome:
        named = Sweep(Layout(self.root), {Sweep.VARIABLE: sweep})
        return run_cell(MATRIX, CELL, named, say=self.said.append, **options)

    @property
    def calls(self) -> list[dict[str, Any]]:
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def results(self) -> Path:
        return Layout(self.root).results / f"{CELL.id}.jsonl"

    @property
    def sidecar(self) -> Sidecar:
        return read_sidecar(self.results.with_name(f"{CELL.id}.cell.json"))

    def cut_short(self, sweep: str, *records: Record, torn: str = "") -> None:
        """Leave what a killed command leaves."""
        self.play(*records)
        self.run(sweep)
        Sweep(Layout(self.root), {Sweep.VARIABLE: sweep}).begin_cell(CELL.id)
        path = self.results.with_name(f"{CELL.id}.cell.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "state": "running", "seconds": 100.0}))
        with open(self.results, "a") as file:
            file.write(torn)


def make_stage(folder: Path) -> Stage:
    python = folder / "env" / "bin" / "python"
    for path in (python.parent, folder / "pytest_trlcompat", folder / "suites", folder / "fixtures"):
        path.mkdir(parents=True)
    (folder / "suites" / "test_a.py").touch()
    python.write_text(PYTEST.format(python=sys.executable, folder=str(folder), project=str(PROJECT)))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return Stage(folder)


def replace_uv(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., str]) -> None:
    """Have environments and builds of torch made by ``fake``, which is called as ``uv`` is."""
    for module, name in ((environments, "uv"), (environments, "uv_cached_first"), (torch_builds, "uv_cached_first")):
        monkeypatch.setattr(module, name, fake)
