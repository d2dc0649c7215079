"""By release and by day, end to end, over a registry that this module makes up.

A lock is what that registry had on a day; an environment is a folder that says which versions it holds; the command
that is asked reads them there.
"""

from __future__ import annotations

import datetime
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version

from pytest_trlcompat.bisect import commands, commits, days, releases, resolving
from pytest_trlcompat.bisect.cli import main
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.releases_index import Listing
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import Unreachable, Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock

if TYPE_CHECKING:
    from tests.conftest import GitHistory

DAY = datetime.date(2025, 1, 1)
CHECK = """\
import json, os, pathlib, sys
from packaging.version import Version as V
held = json.loads((pathlib.Path(os.environ["VIRTUAL_ENV"]) / "versions.json").read_text())
overlay = os.environ.get("PYTHONPATH")
commit = json.loads((pathlib.Path(overlay) / "state.json").read_text())["number"] if overlay else None
with open("runs.jsonl", "a") as file:
    print(json.dumps(held), file=file)
def at_least(name, version): return V(held[name]) >= V(version)
{rule}
"""
SILENT = "if {condition}: raise ValueError('loss is 0.3, not 0.1')"


@dataclass
class Registry:
    """What was released when, in days after 2025-01-01, and which versions go together.

    Attributes:
        needs: a package's release needs another package at least at a version.
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
        return Lock(name, date, "3.11", dict(sorted(versions.items())), "asked")

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
        born = max(self.released[name][version] for name, version in cell.pins.items())
        return DAY + datetime.timedelta(days=born + matrix.settle_days)

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


TRANSFORMERS = {f"4.{minor}.0": 10 * (minor - 40) for minor in range(40, 60)}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry(
        tmp_path,
        {
            "transformers": dict(TRANSFORMERS),
            "trl": {"0.14.0": 5},
            "tokenizers": {"0.20": 0, "0.21": 95},
            "accelerate": {"1.0": 0, "1.1": 60, "1.2": 118, "1.3": 150},
        },
    )
    for room in (releases, commands):
        monkeypatch.setattr(room, "lock_for", made.lock_for)
    for room in (days, commands):
        monkeypatch.setattr(room, "resolve", made.resolve)
    for room in (resolving, commits):
        monkeypatch.setattr(room, "ensure", made.ensure)
    monkeypatch.setattr(resolving, "compile_versions", made.compile)
    monkeypatch.setattr(commands, "find_date", made.find_date)
    monkeypatch.setattr(commands, "list_releases", made.listing)
    monkeypatch.chdir(tmp_path)
    return made


def rule(registry: Registry, text: str) -> None:
    (registry.folder / "check.py").write_text(CHECK.format(rule=text))


def ask(registry: Registry, *arguments: str) -> int:
    command = ["--command", f"{sys.executable} check.py", "--state", "state", "--json", "result.json"]
    return main([*arguments, *command])


def result(registry: Registry) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((registry.folder / "result.json").read_text())
    return loaded


OVER_ALL = ("releases", "--package", "transformers", "--good", "4.40.0", "--bad", "4.59.0", "--with", "trl=0.14.0")


def test_the_release_that_broke_it(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    registry.released["transformers"]["4.51.0rc1"] = 109
    registry.yanked["transformers"] = {"4.47.0": "broken wheel"}
    registry.unbuildable = ("transformers==4.50.0",)
    rule(
        registry,
        SILENT.format(condition="at_least('transformers', '4.52')")
        + "\nif held['transformers'].startswith('4.54'): raise KeyError('another')",
    )
    assert ask(registry, *OVER_ALL) == 0
    out = capsys.readouterr().out
    assert "left out: yanked: 4.47.0 (broken wheel)\nleft out: pre-releases: 4.51.0rc1\n" in out
    assert "19 releases of transformers from 4.40.0 to 4.59.0\n" in out
    assert "testing transformers 4.40.0, about 7 steps left\n" in out
    assert "bad is: ValueError: loss is N, not N in " in out
    assert "4.50.0: cannot tell (untestable: Failed to build transformers==4.50.0) [" in out
    culprit = result(registry)["culprit"]
    assert culprit.pop("confidence") > 0.98
    assert culprit == {
        "package": "transformers",
        "last_good": "4.51.0",
        "first_bad": "4.52.0",
        "cannot_tell": [],
        "together_with": [],
        "notes": [],
        "alone": True,
    }
    assert result(registry)["locks"]["moved"]["transformers"] == ["4.51.0", "4.52.0"]
    (search,) = result(registry)["searches"]
    assert search["asked"] == len([step for step in result(registry)["steps"] if step["phase"] == "releases"])
    assert search["bound"] == 4.17
    assert search["asked"] <= 2 + 5 + search["cannot_tell"]


def test_the_release_that_cured_it(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    rule(registry, SILENT.format(condition="not at_least('transformers', '4.45')"))
    arguments = ["--package", "transformers", "--bad", "4.40.0", "--good", "4.59.0", "--find-fix"]
    assert ask(registry, "releases", *arguments, "--with", "trl=0.14.0") == 0
    culprit = result(registry)["culprit"]
    assert (culprit["last_bad"], culprit["first_good"]) == ("4.44.0", "4.45.0")
    assert "transformers 4.45.0 cured `" in capsys.readouterr().out


def test_a_change_beside_the_release_is_told_from_it(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    """accelerate 1.2 came out two days before transformers 4.52.0, which gets the blame until it is held alone."""
    rule(registry, SILENT.format(condition="at_least('accelerate', '1.2')"))
    assert ask(registry, *OVER_ALL) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("accelerate", "1.1", "1.2")
    assert culprit["notes"] == ["it was not transformers: what turned it alone is accelerate, changed beside it"]
    assert "2 packages changed there: transformers, accelerate\n" in capsys.readouterr().out


def test_the_same_command_resolves_and_runs_nothing_again(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, *OVER_ALL) == 0
    first, runs = result(registry), len(registry.runs)
    assert [step["phase"] for step in first["steps"]][-1] == "packages"

    def refuse(*words: object) -> Lock:
        raise AssertionError("it was resolved again")

    monkeypatch.setattr(releases, "lock_for", refuse)
    monkeypatch.setattr(resolving, "compile_versions", refuse)
    assert ask(registry, *OVER_ALL) == 0
    assert result(registry)["culprit"] == first["culprit"]
    assert len(registry.runs) == runs


def test_the_rest_of_the_stack_may_be_held(registry: Registry) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, *OVER_ALL, "--rest", "fixed") == 0
    assert result(registry)["culprit"]["first_bad"] == "4.52.0"
    assert {run["accelerate"] for run in registry.runs} == {"1.3"}
    assert list(result(registry)["locks"]["moved"]) == ["transformers"]


def test_pre_releases_and_yanked_ones_are_taken_when_asked(registry: Registry) -> None:
    registry.released["transformers"]["4.51.1rc1"] = 112
    registry.yanked["transformers"] = {"4.52.0": ""}
    rule(registry, SILENT.format(condition="at_least('transformers', '4.51.1rc1')"))
    assert ask(registry, *OVER_ALL, "--pre", "--yanked") == 0
    culprit = result(registry)["culprit"]
    assert (culprit["last_good"], culprit["first_bad"]) == ("4.51.0", "4.51.1rc1")


def test_what_cannot_tell_between_is_named(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    registry.unbuildable = ("transformers==4.51.0", "transformers==4.52.0")
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, *OVER_ALL) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["last_good"], culprit["first_bad"]) == ("4.50.0", "4.53.0")
    assert culprit["cannot_tell"] == ["4.51.0", "4.52.0"]
    assert "between them 4.51.0, 4.52.0 cannot tell, so it may be one of these" in capsys.readouterr().out


def test_two_releases_without_one_between(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    arguments = ["--package", "transformers", "--good", "4.51.0", "--bad", "4.52.0"]
    assert ask(registry, "releases", *arguments, "--with", "trl=0.14.0") == 0
    assert "no release lies between 4.51.0 and 4.52.0: only these two are tested" in capsys.readouterr().out
    assert result(registry)["culprit"]["first_bad"] == "4.52.0"


@pytest.mark.parametrize(
    "good, bad, options, message",
    [
        (
            "4.59.0",
            "4.40.0",
            [],
            "the bad one comes after the good one, but bad 4.40.0 comes before good 4.59.0; ",
        ),
        ("4.40.0", "4.59.0", ["--find-fix"], "with --find-fix the good one comes after the bad one, but good "),
        ("4.40.0", "4.45.0", [], "both ends are good, so nothing turns between them. transformers 4.40.0, given as "),
        (
            "4.53.0",
            "4.59.0",
            [],
            "both ends are bad, so nothing turns between them. transformers 4.53.0, ",
        ),
        ("4.59.0", "4.45.0", ["--find-fix"], "good and bad are swapped. transformers 4.59.0, given as good: bad ("),
        (
            "4.40.5",
            "4.59.0",
            [],
            "transformers 4.40.5 is unknown to the registry (as of 2026-01-01); near it are ",
        ),
        ("4.40.x", "4.59.0", [], "--good 4.40.x: not a version; write for example --good 4.51.3"),
        ("4.40.0", "4.40.0", [], "good and bad are both 4.40.0; there is nothing to search"),
        ("4.46.0", "4.59.0", [], "transformers 4.46.0 cannot tell, so the search has no end to start from."),
        (
            "4.40.0",
            "4.59.0",
            ["--with", "transformers=4.1"],
            "transformers is what is searched; leave ",
        ),
        (
            "4.40.0",
            "4.59.0",
            ["--with", "trl=9"],
            "--with trl=9: No solution found Because there is no version of trl==9",
        ),
        ("4.40.0", "4.59.0", ["--strategy", "fsdp1"], "--strategy chooses among the checks of a suite; "),
        ("4.40.0", "4.59.0", ["--issue", "nothing"], "one of --issue ID, --pytest TEXT and --command TEXT"),
        ("4.40.0", "4.59.0", ["--clone", "trl"], "--clone trl: write PACKAGE=FOLDER"),
        ("4.40.0", "4.59.0", ["--clone", "trl=nowhere"], "there is no such folder; give the folder of a git clone"),
    ],
)
def test_bad_input_is_one_clear_message(
    registry: Registry, capsys: pytest.CaptureFixture[str], good: str, bad: str, options: list[str], message: str
) -> None:
    registry.unbuildable = ("transformers==4.46.0",)
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    arguments = ["--package", "transformers", "--good", good, "--bad", bad]
    assert ask(registry, "releases", *arguments, *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not (registry.folder / "result.json").exists()


def test_without_a_network_nothing_is_blamed_and_the_steps_are_kept(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    registry.reachable = False
    assert ask(registry, *OVER_ALL) == 2
    assert "the releases of transformers could not be listed: no network" in capsys.readouterr().err

    registry.reachable = True
    lock_for, calls = registry.lock_for, []

    def fails_at_the_third(matrix: Matrix, cell: Cell, layout: Layout) -> Lock:
        calls.append(cell)
        registry.reachable = len(calls) != 3
        return lock_for(matrix, cell, layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(releases, "lock_for", fails_at_the_third)
        assert ask(registry, *OVER_ALL) == 2
    err = capsys.readouterr().err
    assert "the package registry cannot be reached and the cache does not do, so nothing is known of it" in err
    assert "run the same command again with a network" in err
    registry.reachable = True
    assert ask(registry, *OVER_ALL) == 0
    steps = result(registry)["steps"]
    assert [step["kept"] for step in steps[:3]] == [True, True, False]


def test_the_report_can_be_pasted(registry: Registry) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, *OVER_ALL, "--report", "report.md") == 0
    text = (registry.folder / "report.md").read_text()
    assert text.startswith("# transformers 4.52.0 broke `")
    assert "| last good, by releases | transformers 4.51.0 |\n" in text
    assert "| first bad, by releases | transformers 4.52.0 |\n" in text
    assert "-transformers==4.51.0\n+transformers==4.52.0\n" in text
    assert "transformers alone turned it" in text
    assert "ValueError: loss is 0.3, not 0.1\n" in text
    assert "\ntrlcompat bisect releases --package transformers --good 4.40.0 --bad 4.59.0 --with trl=0.14.0 " in text
    assert "--json" not in text
    assert "| transformers 4.40.0 | good | exit status 0 |" in text
    for title in ("before", "after"):
        assert f"<details><summary>All versions {title} (Python 3.11, as of 2025-0" in text


OVER_DAYS = ("days", "--good", "2025-02-01", "--bad", "2025-07-10", "--with", "trl=0.14.0")


def test_by_days_it_names_the_package_and_the_release(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, *OVER_DAYS) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("transformers", "4.51.0", "4.52.0")
    # Released on 2025-05-01, so in the registry as it stood when the next day began.
    assert culprit["days"] == {"last_good": "2025-05-01", "first_bad": "2025-05-02"}
    (search,) = result(registry)["searches"]
    assert search["asked"] <= 2 + 8
    held = [tuple(sorted(run.items())) for run in registry.runs]
    assert len(held) == len(set(held)), "equal versions were run twice"
    assert "the versions of the stack of 2025-" in capsys.readouterr().out


def test_by_days_a_package_with_what_it_needs(registry: Registry) -> None:
    """On one day came transformers 4.50, the tokenizers that it needs, and an innocent accelerate."""
    registry.released["tokenizers"] = {"0.20": 0, "0.21": 100}
    registry.released["accelerate"] = {"1.0": 0, "1.1": 100}
    registry.needs = [("transformers", "4.50", "tokenizers", "0.21")]
    rule(registry, SILENT.format(condition="at_least('transformers', '4.50')"))
    assert ask(registry, *OVER_DAYS) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("transformers", "4.49.0", "4.50.0")
    assert culprit["alone"] is True


def test_by_days_two_packages_that_are_needed_together(registry: Registry) -> None:
    registry.released["tokenizers"] = {"0.20": 0, "0.21": 100}
    registry.released["accelerate"] = {"1.0": 0, "1.1": 100}
    rule(registry, SILENT.format(condition="at_least('transformers', '4.50') and at_least('tokenizers', '0.21')"))
    assert ask(registry, *OVER_DAYS) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["together_with"]) == ("transformers", ["tokenizers"])
    assert culprit["alone"] is True


def test_by_days_several_releases_of_one_day(registry: Registry) -> None:
    registry.released["transformers"] = {"4.40.0": 0, "4.41.0": 99, "4.42.0": 99, "4.43.0": 99, "4.44.0": 99}
    rule(registry, SILENT.format(condition="at_least('transformers', '4.42')"))
    assert ask(registry, *OVER_DAYS) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("transformers", "4.41.0", "4.42.0")
    assert [search["phase"] for search in result(registry)["searches"]] == ["days", "releases"]


@pytest.mark.parametrize(
    "good, bad, message",
    [
        ("2025-07-10", "2025-02-01", "the bad one comes after the good one, but bad 2025-02-01 comes before good "),
        (
            "2025-02-01",
            "2025-02-01",
            "good and bad are both 2025-02-01; there is nothing to search, name ",
        ),
        ("2025-01-03", "2025-02-01", "2025-01-03 is too early: the versions of --with were all there on 2025-01-06 "),
        ("2025-02-01", "2999-01-01", "2999-01-01 is in the future; today is "),
        ("soon", "2025-02-01", "bad date 'soon'; write a day, for example 2025-02-28"),
    ],
)
def test_days_that_make_no_sense_are_one_clear_message(
    registry: Registry, capsys: pytest.CaptureFixture[str], good: str, bad: str, message: str
) -> None:
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, "days", "--good", good, "--bad", bad, "--with", "trl=0.14.0") == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def make_clone(git_history: GitHistory, folder: Path, count: int, tags: Mapping[str, int]) -> list[str]:
    shas = git_history.make(folder, [{"number": number} for number in range(count)])
    for tag, number in tags.items():
        git_history.run(folder, "tag", tag, shas[number])
    return shas


def install(arguments: Sequence[str]) -> str:
    """What uv would do with a commit's files."""
    shutil.copytree(arguments[-1], arguments[arguments.index("--target") + 1])
    return ""


def test_one_command_goes_from_two_days_to_the_commit(
    registry: Registry, git_history: GitHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shas = make_clone(git_history, registry.folder / "clone", 30, {"v4.51.0": 3, "v4.52.0": 27})
    monkeypatch.setattr(commits, "uv_cached_first", install)
    rule(
        registry,
        "import builtins\nif commit == 20: raise ImportError('half a refactoring here')\n"
        + SILENT.format(condition="commit >= 18 if commit is not None else at_least('transformers', '4.52')"),
    )
    assert ask(registry, *OVER_DAYS, "--clone", "transformers=clone") == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["last_good"], culprit["first_bad"]) == ("transformers", "4.51.0", "4.52.0")
    assert culprit["commits"]["last_good"] == shas[17]
    assert culprit["commits"]["first_bad"] == shas[18]
    assert result(registry)["verdict"].startswith(f"transformers {shas[18][:10]} (change 18) broke")
    assert [search["phase"] for search in result(registry)["searches"]] == ["days", "commits"]


@pytest.mark.parametrize("held", [(), ("--with", "accelerate=1.3", "trl=0.14.0")])
def test_commits_of_a_package_are_installed_over_one_environment(
    registry: Registry, git_history: GitHistory, monkeypatch: pytest.MonkeyPatch, held: tuple[str, ...]
) -> None:
    """What is held may be newer than the commits, which are of January."""
    shas = make_clone(git_history, registry.folder / "clone", 12, {})
    monkeypatch.setattr(commits, "uv_cached_first", install)
    rule(registry, SILENT.format(condition="commit >= 7"))
    arguments = ["--package", "transformers", "--clone", "clone", "--good", shas[0], "--bad", shas[-1]]
    assert ask(registry, "commits", *arguments, *held) == 0
    culprit = result(registry)["culprit"]
    assert (culprit["package"], culprit["first_bad"]) == ("transformers", shas[7])
    assert {run["accelerate"] for run in registry.runs} == ({"1.3"} if held else {"1.0"})
    assert len(list((registry.folder / "envs").iterdir())) == 1


def test_a_clone_without_the_tags_loses_nothing_that_was_found(
    registry: Registry, git_history: GitHistory, capsys: pytest.CaptureFixture[str]
) -> None:
    make_clone(git_history, registry.folder / "clone", 5, {})
    rule(registry, SILENT.format(condition="at_least('transformers', '4.52')"))
    assert ask(registry, *OVER_ALL, "--clone", "transformers=clone") == 0
    culprit = result(registry)["culprit"]
    assert culprit["first_bad"] == "4.52.0"
    (note,) = culprit["notes"]
    assert note.startswith("the commit was not found: --clone ")
    assert "no tag for release 4.51.0 (v4.51.0 was looked for); fetch the tags: git fetch --tags" in note
