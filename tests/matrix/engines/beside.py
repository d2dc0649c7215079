"""A checkout whose cells are measured by a fake pytest: it takes groups of launches as the real one does."""

from __future__ import annotations

import dataclasses
import json
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytest_trlcompat.catalog.verdict import Record
from pytest_trlcompat.matrix import disk
from pytest_trlcompat.matrix import job as job_module
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.engines.local import LocalEngine
from pytest_trlcompat.matrix.engines.places import Places
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.job import CellJob
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.sweep import Sweep
from tests.matrix.made_up import LOCK, MATRIX

__all__ = ["NEW", "OLD", "OLDEST", "Checkout", "machine"]

NEW, OLD, OLDEST = (Cell({"trl": version}) for version in ("1.16.0", "0.15.2", "0.12.2"))
PROJECT = Path(__file__).resolve().parents[3]

PYTEST = """#!{python}
import json, os, pathlib, signal, sys, time
sys.path.insert(0, {project!r})
from pytest_trlcompat import _provenance
from pytest_trlcompat.matrix.claims import GroupTable
here = pathlib.Path({folder!r})
results = pathlib.Path(sys.argv[sys.argv.index("--trlcompat-results") + 1])
table = GroupTable(pathlib.Path(sys.argv[sys.argv.index("--trlcompat-claims") + 1]))
play = json.loads((here / f"{{results.stem}}.play.json").read_text())
code = _provenance.code_digest(pathlib.Path(os.environ.get("PYTHONPATH", here)))
provenance = str(_provenance.Provenance(code, _provenance.of_environment(pathlib.Path(__file__).parents[1])))

def log(what):
    with open(here / "log.jsonl", "a") as file:
        print(json.dumps([time.time(), os.getpid(), results.stem, what]), file=file)

def others():
    return sum(json.loads(line)[3] == "began" for line in (here / "log.jsonl").read_text().splitlines())

log("began")
deadline = time.monotonic() + 120
while others() < play["meet"] and time.monotonic() < deadline:
    time.sleep(0.02)
groups = table.arrange(dict.fromkeys(play["groups"], 1), play["answers"])
while (claim := table.claim(groups)) is not None:
    name = claim.group.name
    log(name)
    print(f"{{results.stem}} {{name}}", flush=True)
    if name == play["killed"] and play["deaths"] > len(list(here.glob("death-*"))):
        (here / f"death-{{os.getpid()}}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    claim.begins()
    time.sleep(play["seconds"])
    with open(results, "a") as file:
        for line in play["groups"][name]:
            print(json.dumps({{**json.loads(line), "provenance": provenance}}), file=file)
    claim.done()
log("ended")
sys.exit(play["status"])
"""


def machine(cores: float = 2.0, others: float = 0.0, memory: int = 2**40) -> Any:
    """A machine as somebody has made it."""
    return SimpleNamespace(cores=cores, busy_with_others=lambda: others, free_memory=lambda: memory)


@dataclass
class Checkout:
    root: Path
    said: list[str] = field(default_factory=list)
    say: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        python = self.root / "env" / "bin" / "python"
        for path in (python.parent, self.root / "pytest_trlcompat", self.root / "suites", self.root / "fixtures"):
            path.mkdir(parents=True, exist_ok=True)
        python.write_text(PYTEST.format(python=sys.executable, folder=str(self.root), project=str(PROJECT)))
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        self.layout = Layout(self.root)

    def play(
        self,
        cell: Cell,
        groups: Mapping[str, Sequence[Record]],
        *,
        seconds: float = 0.0,
        answers: Sequence[str] = (),
        killed: str = "",
        deaths: int = 1,
        status: int = 0,
        meet: int = 1,
    ) -> None:
        """What the fake pytest does in a cell.

        Args:
            groups: by name, what is measured in each.
            seconds: that each takes.
            killed: the group in which the process dies, ``deaths`` times.
            status: with which it ends.
            meet: how many processes of all cells begin before it takes a group.
        """
        lines = {name: [record.to_json() for record in records] for name, records in groups.items()}
        how: dict[str, object] = {
            "answers": list(answers),
            "killed": killed,
            "deaths": deaths,
            "seconds": seconds,
            "status": status,
        }
        how["meet"] = meet
        (self.root / f"{cell.id}.play.json").write_text(json.dumps({"groups": lines, **how}))

    def engine(
        self, *cells: Cell, places: Places | None = None, costs: Mapping[str, float] | None = None, newest: str = ""
    ) -> LocalEngine:
        """An engine that has these cells."""
        sweep = Sweep(self.layout, {Sweep.VARIABLE: "first"})
        places = places or Places(self.layout.results / ".places" / "first", machine=machine())
        say = self.say or self.said.append
        engine = LocalEngine(sweep, places, costs or {}, say, newest)

        def make(cell: Cell, later: Sequence[Cell]) -> CellJob:
            return CellJob(MATRIX, cell, sweep, (), False, (), tuple(later), say)

        engine.add(cells, make)
        return engine

    def replace_environments(self, put: Callable[[object, str, Any], None]) -> None:
        """Have cells use the fake environment; ``put`` is as ``monkeypatch.setattr``."""
        put(job_module, "lock_for", lambda matrix, cell, layout: dataclasses.replace(LOCK, cell_id=cell.id))
        put(disk, "free_space", lambda *arguments: None)
        put(job_module, "ensure", lambda lock, layout, say: Environment(self.root / "env"))

    def log(self) -> list[tuple[float, int, str, str]]:
        """When which process of which cell began, took a group and ended."""
        path = self.root / "log.jsonl"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def most_at_a_time(self) -> int:
        """Processes that ran at the same time."""
        running, most = set[int](), 0
        for _, pid, _, what in sorted(self.log()):
            running = running - {pid} if what == "ended" else running | {pid}
            most = max(most, len(running))
        return most

    def groups_of(self, cell: Cell) -> list[str]:
        """Those that processes of a cell have taken, in order."""
        return [
            what for _, _, cell_id, what in sorted(self.log()) if cell_id == cell.id and what not in ("began", "ended")
        ]
