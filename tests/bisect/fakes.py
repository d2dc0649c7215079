"""A fake package registry, a command that tests its releases, and one that tests the commits of a made git history.

A lock is what the registry had on a day; an environment is a folder with a file of versions, which the command reads.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from pytest_trlcompat.bisect.candidates.releases import Listing
from pytest_trlcompat.bisect.cli import main
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import Unreachable, Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock

DAY = datetime.date(2025, 1, 1)
CHECK_SCRIPT = """\
import json, os, pathlib, sys
from packaging.version import Version as V
held = json.loads((pathlib.Path(os.environ["VIRTUAL_ENV"]) / "versions.json").read_text())
overlay = os.environ.get("PYTHONPATH")
commit = json.loads((pathlib.Path(overlay) / "state.json").read_text())["number"] if overlay else None
with open("runs.jsonl", "a") as file:
    print(json.dumps(held), file=file)
def at_least(name, version): return V(held[name]) >= V(version)
{body}
"""
COMMIT_CHECK = """\
import json, sys
state = json.load(open("state.json"))
print("checking", state["number"])
if state["build"] == "missing":
    sys.exit(125)
if state["build"] == "broken":
    raise ImportError("cannot import name 'thing' from 'package'")
if state["other"]:
    raise KeyError(f"unrelated {state['number']}")
if state["bad"]:
    raise ValueError(f"loss is {0.1 * state['number']} instead of 0.5 at 0x{state['number']:x}")
"""
FAIL_IF = "if {condition}: raise ValueError('loss is 0.3, not 0.1')"

TRANSFORMERS = {f"4.{minor}.0": 10 * (minor - 40) for minor in range(40, 60)}
ALL_RELEASES = ("releases", "--package", "transformers", "--good", "4.40.0", "--bad", "4.59.0", "--with", "trl=0.14.0")
ALL_DAYS = ("days", "--good", "2025-02-01", "--bad", "2025-07-10", "--with", "trl=0.14.0")

RUN_CHECK = f"{sys.executable} check.py"


@dataclass
class FakeRegistry:
    """What was released when, in days after 2025-01-01, and which versions are compatible.

    Attributes:
        needs: (package, version, other package, least version): from this version on it needs the other one.
        unbuildable: ``name==version`` of what cannot be installed.
    """

    folder: Path
    released: dict[str, dict[str, int]]
    yanked: dict[str, dict[str, str]] = field(default_factory=dict)
    needs: list[tuple[str, str, str, str]] = field(default_factory=list)
    unbuildable: tuple[str, ...] = ()
    reachable: bool = True

    def newest(self, package: str, date: datetime.date) -> str | None:
        on_time = [text for text, day in self.released[package].items() if DAY + datetime.timedelta(days=day) < date]
        return max((text for text in on_time if not Version(text).is_prerelease), key=Version, default=None)

    def lock(self, name: str, pins: Mapping[str, str], date: datetime.date) -> Lock:
        if not self.reachable:
            raise Unreachable("Failed to fetch\nand without the network: not cached")
        free = {package: self.newest(package, date) for package in self.released}
        versions = {**{package: version for package, version in free.items() if version}, **pins}
        for package, version in versions.items():
            if version not in self.released[package]:
                raise Untestable(f"there is no version of {package}=={version}")
            if DAY + datetime.timedelta(days=self.released[package][version]) >= date:
                raise Untestable(f"{package}=={version} was filtered by exclude-newer {date}")
        for package, version, other, least in self.needs:
            if Version(versions[package]) >= Version(version) and Version(versions[other]) < Version(least):
                raise Untestable(f"{package} {versions[package]} needs {other}>={least}")
        return Lock(name, date, "3.11", dict(sorted(versions.items())), "digest")

    def lock_for(self, matrix: Matrix, cell: Cell, layout: Layout) -> Lock:
        days = [self.released[name][version] for name, version in cell.pins.items() if version in self.released[name]]
        if len(days) < len(cell.pins):
            raise Untestable(f"no solution for {cell.id}")
        return self.lock(cell.id, cell.pins, DAY + datetime.timedelta(days=max(days) + 3))

    def resolve(self, matrix: Matrix, cell: Cell) -> Lock:
        assert cell.date is not None
        return self.lock("", cell.pins, cell.date)

    def compile(
        self, matrix: Matrix, requirements: Sequence[str], date: datetime.date, preferred: Sequence[str] = ()
    ) -> dict[str, str]:
        pins = dict(line.split("==") for line in requirements if "==" in line and line.split("==")[0] in self.released)
        kept = dict(line.split("==") for line in preferred)
        try:
            return dict(self.lock("", {**kept, **pins}, date).packages)
        except Untestable:
            if not preferred:
                raise
            return dict(self.lock("", pins, date).packages)

    def ensure(self, lock: Lock, layout: Layout, say: Callable[[str], None]) -> Environment:
        for line in lock.requirements:
            if line in self.unbuildable:
                raise Untestable(f"Failed to build {line}")
        root = self.folder / "envs" / lock.digest
        if not root.is_dir():
            say(f"building {root.name}")
            (root / "bin").mkdir(parents=True)
            (root / "versions.json").write_text(json.dumps(dict(lock.packages)))
        return Environment(root)

    def find_date(self, matrix: Matrix, cell: Cell) -> datetime.date:
        for name, version in cell.pins.items():
            if version not in self.released[name]:
                raise Untestable(f"No solution found\nBecause there is no version of {name}=={version}")
        released = max(self.released[name][version] for name, version in cell.pins.items())
        return DAY + datetime.timedelta(days=released + matrix.settle_days)

    def listing(self, package: str, python: str, kept: Path) -> Listing:
        if not self.reachable:
            raise BisectError(f"the releases of {package} could not be listed: no network")
        yanked = self.yanked.get(package, {})
        versions = sorted((text for text in self.released[package] if text not in yanked), key=Version)
        return Listing(package, tuple(versions), yanked, "2026-01-01")

    @property
    def runs(self) -> list[dict[str, str]]:
        path = self.folder / "runs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_check(registry: FakeRegistry, body: str) -> None:
    (registry.folder / "check.py").write_text(CHECK_SCRIPT.format(body=body))


def run_bisect(registry: FakeRegistry, *arguments: str) -> int:
    command = ["--command", RUN_CHECK, "--state", "state", "--json", "result.json"]
    return main([*arguments, *command])


def read_result(registry: FakeRegistry) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((registry.folder / "result.json").read_text())
    return loaded


def states_of(count: int, change: int, *, broken: range, missing: set[int], other: range) -> list[Mapping[str, Any]]:
    """What each commit of a git history does in ``COMMIT_CHECK``."""

    def build(number: int) -> str:
        if number in missing:
            return "missing"
        return "broken" if number in broken else "fine"

    return [
        {"number": number, "build": build(number), "other": number in other, "bad": number >= change}
        for number in range(count)
    ]
