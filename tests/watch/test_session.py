"""A watch from end to end, with a small index and uv; what stands in for trainings writes the verdicts of a cell."""

from __future__ import annotations

import dataclasses
import datetime
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.evidence import Evidence
from pytest_trlcompat.catalog.verdict import Record, Verdict, append_record
from pytest_trlcompat.matrix import disk, locks, process
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.results import INTERRUPTED, TESTED, UNTESTABLE, Outcome, Sidecar
from pytest_trlcompat.matrix.suite_run import code_digest
from pytest_trlcompat.watch import cli, running
from pytest_trlcompat.watch.arguments import parse
from pytest_trlcompat.watch.layout import WatchLayout

from ..conftest import GitHistory
from .clones import make_clone
from .made_up import record
from .test_patch import write_catalogue

TODAY = datetime.date(2026, 6, 11)


class Trainings:
    """Stands in for environments, trainings and bisections.

    Attributes:
        ran: the cells, in their order.
        verdicts: what a cell gives, by its versions.
        before_each: called before a cell ends.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.bisected: list[list[str]] = []
        self.verdicts: Callable[[dict[str, str]], list[Record]] = lambda versions: [record("ok", issue="grpo-x")]
        self.before_each: Callable[[str], None] = lambda cell: None
        self.state, self.reason = TESTED, ""

    def run_cell(self, matrix: Matrix, cell: Cell, sweep: Any, **options: Any) -> Outcome:
        layout = sweep.layout
        lock = locks.lock_for(matrix, cell, layout)
        sidecar = Sidecar(cell.id, matrix.all_pins(cell), INTERRUPTED, sweep.name, lock.packages, str(lock.date))
        path = layout.results / f"{cell.id}.cell.json"
        write_whole(path, sidecar.to_json())
        self.before_each(cell.id)
        self.ran.append(cell.id)
        for each in self.verdicts(dict(lock.packages)):
            append_record(layout.results / f"{cell.id}.jsonl", each)
        sidecar = dataclasses.replace(
            sidecar, state=self.state, reason=self.reason, provenance=f"{code_digest(layout)}.{'0' * 12}"
        )
        write_whole(path, sidecar.to_json())
        return Outcome(sidecar, ())

    def bisect(self, command: list[str], **options: Any) -> int:
        self.bisected.append(command)
        return 2


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch, checkout: WatchLayout) -> Trainings:
    found = Trainings()
    monkeypatch.setattr(running, "run_cell", found.run_cell)
    monkeypatch.setattr(process, "run", found.bisect)
    write_catalogue(checkout.catalog)
    catalog = known_issues.load.__wrapped__(checkout.catalog)
    monkeypatch.setattr(known_issues, "load", lambda: catalog)
    (checkout.root / "fixtures" / "hashes").mkdir()
    (checkout.root / "fixtures" / "hashes" / "3.11.txt").write_text("")
    return found


@pytest.fixture
def watch(checkout: WatchLayout, trainings: Trainings) -> Callable[..., tuple[int, str]]:
    """Run the watch with these arguments; returns the exit status and what it said."""

    def run(*words: str, today: datetime.date = TODAY) -> tuple[int, str]:
        said: list[str] = []
        options = parse(["--package", "trl", "--package", "accelerate", *words], today)
        return cli.watch(options, checkout.root, said.append, ask_all), "\n".join(said)

    return run


def ask_all(packages: Any, python: str, prereleases: bool) -> Any:
    """The small index has no DeepSpeed."""
    from pytest_trlcompat.watch.index import ask

    return ask([package for package in packages if package != "deepspeed"], python, prereleases)


def silent(versions: dict[str, str]) -> list[Record]:
    return [record("silent", "silent", issue="grpo-x")]


def cured_by_trl(versions: dict[str, str]) -> list[Record]:
    """As grpo-x is predicted, but for TRL 1.1.0."""
    return [record("ok" if versions["trl"] == "1.1.0" else "silent", "silent", issue="grpo-x")]


Watch = Callable[..., tuple[int, str]]


@pytest.fixture
def clone(git_history: GitHistory, tmp_path: Path) -> Path:
    """Of Accelerate, of which a watch on 2026-06-09 knows 1.0.0."""
    folder = tmp_path / "clone"
    make_clone(git_history, folder, "accelerate", ("1.0.0",), ("1.1.0.dev0",), ("broken",))
    git_history.run(folder, "tag", "v1.0.0", "main~2")
    return folder


BEFORE = datetime.date(2026, 6, 9)
"""A day on which no release of Accelerate or TRL is new."""


def test_a_commit_of_a_clone_is_run_once_like_a_new_release(
    watch: Watch, trainings: Trainings, checkout: WatchLayout, clone: Path
) -> None:
    trainings.verdicts = silent
    status, said = watch("--commit", f"accelerate={clone}@main~1", today=BEFORE)
    version = f"1.1.0.dev0+g{sha(clone, 'main~1')[:10]}"
    assert status == 0
    assert f"new as of 2026-06-09: accelerate {version} (2026-06-08)" in said
    assert trainings.ran == ["trl1.0.0-tf5.0.0", f"trl1.0.0-tf5.0.0-accelerate{version}"]
    raw = json.loads((checkout.day(BEFORE) / "report.json").read_text())
    assert [each["sha"] for each in raw["commits"]] == [sha(clone, "main~1")]
    assert raw["new"] == []
    for name in ("report.md", "report.html"):
        assert version in (checkout.day(BEFORE) / name).read_text()
    assert not (checkout.day(BEFORE) / "changes.patch").exists()  # a commit is no cell of the matrix
    watch("--commit", f"accelerate={clone}@main~1", today=BEFORE)
    assert len(trainings.ran) == 2


def test_what_a_commit_broke_is_searched_among_the_commits_since_the_release(
    watch: Watch, trainings: Trainings, checkout: WatchLayout, clone: Path
) -> None:
    """And no prediction is written of it."""
    trainings.verdicts = lambda versions: [
        record("broken" if "+g" in versions["accelerate"] else "ok", "ok", issue="grpo-x", subject="upstream")
    ]
    (issue,) = known_issues.load().values()
    right = dataclasses.replace(issue.predictions[-1], verdict=Verdict.OK)
    known_issues.load()["grpo-x"] = dataclasses.replace(issue, predictions=(right,))
    assert watch("--commit", f"accelerate={clone}@main~1", today=BEFORE)[0] == 1
    (command,) = trainings.bisected
    words = command[command.index("commits") :]
    assert words[:4] == ["commits", "--package", "accelerate", "--allow-dirty"]
    assert words[words.index("--with") + 1] == "accelerate=1.0.0"
    assert (words[words.index("--good") + 1], words[words.index("--bad") + 1]) == ("v1.0.0", sha(clone, "main~1"))
    assert words[words.index("--clone") + 1] == str(clone)
    assert not (checkout.day(BEFORE) / "changes.patch").exists()
    assert "a commit is no release" in (checkout.day(BEFORE) / "report.md").read_text()


def test_a_cure_in_a_commit_is_searched_although_no_release_lies_between(
    watch: Watch, trainings: Trainings, clone: Path
) -> None:
    trainings.verdicts = lambda versions: [
        record("ok" if "+g" in versions["accelerate"] else "silent", "silent", issue="grpo-x")
    ]
    assert watch("--commit", f"accelerate={clone}@main~1", today=BEFORE)[0] == 1
    (command,) = trainings.bisected
    assert "--find-fix" in command
    assert command[command.index("--good") + 1] == sha(clone, "main~1")


def test_without_the_tag_of_the_release_before_it_no_search_is_begun(
    watch: Watch, trainings: Trainings, checkout: WatchLayout, clone: Path, git_history: GitHistory
) -> None:
    git_history.run(clone, "tag", "--delete", "v1.0.0")
    trainings.verdicts = lambda versions: [
        record("ok" if "+g" in versions["accelerate"] else "silent", "silent", issue="grpo-x")
    ]
    watch("--commit", f"accelerate={clone}@main~1", today=BEFORE)
    assert trainings.bisected == []
    assert "no tag for release 1.0.0" in (checkout.day(BEFORE) / "report.md").read_text()


def test_a_commit_that_is_a_known_release_is_not_new(watch: Watch, trainings: Trainings, clone: Path) -> None:
    status, said = watch("--commit", f"accelerate={clone}@v1.0.0", today=BEFORE)
    assert (status, trainings.ran) == (0, [])
    assert "is release 1.0.0, which is known" in said
    assert "nothing new" in said


def test_a_commit_that_cannot_be_built_does_not_keep_the_rest_from_being_run(
    watch: Watch, trainings: Trainings, checkout: WatchLayout, clone: Path
) -> None:
    trainings.verdicts = silent
    _, said = watch("--commit", f"accelerate={clone}")
    assert len(trainings.ran) == 4  # those of the new releases
    assert "cannot be built" in said
    assert "not reached: accelerate" in said
    assert json.loads((checkout.day(TODAY) / "report.json").read_text())["complete"] is False


def test_status_2_where_all_that_was_asked_for_cannot_be_built(watch: Watch, trainings: Trainings, clone: Path) -> None:
    status, said = watch("--commit", f"accelerate={clone}", today=BEFORE)
    assert (status, trainings.ran) == (2, [])
    assert "cannot be built" in said


def sha(clone: Path, revision: str) -> str:
    return subprocess.run(
        ["git", "-C", str(clone), "rev-parse", revision], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_where_nothing_is_new_nothing_is_resolved_or_run(
    watch: Watch, trainings: Trainings, checkout: WatchLayout, asked: list[str]
) -> None:
    asked.clear()
    status, said = watch(today=datetime.date(2026, 6, 2))
    assert status == 0
    assert said.startswith("nothing new as of 2026-06-02")
    assert sorted(asked) == ["accelerate", "datasets", "peft", "torch", "transformers", "trl"]  # once each, by no uv
    assert not checkout.folder.exists()


def test_new_releases_are_run_once_and_a_page_is_left(
    watch: Watch, trainings: Trainings, checkout: WatchLayout
) -> None:
    trainings.verdicts = silent
    assert watch()[0] == 0
    assert trainings.ran == [
        "trl1.0.0-tf5.0.0",  # no published sweep has measured it
        "trl1.1.0-tf5.1.0",
        "trl1.1.0-tf5.0.0-accelerate1.0.0",
        "trl1.0.0-tf5.0.0-accelerate1.1.0",
    ]
    raw = json.loads((checkout.day(TODAY) / "report.json").read_text())
    assert raw["complete"] is True
    assert raw["changes"] == []
    first = list(trainings.ran)
    assert watch()[0] == 0
    assert trainings.ran == first  # nothing is done twice
    assert watch(today=TODAY + datetime.timedelta(days=1))[0] == 0
    assert trainings.ran == first  # nor on another day


def test_a_cure_is_found_with_its_release_and_the_patch_predicts_it(
    watch: Watch, trainings: Trainings, checkout: WatchLayout
) -> None:
    trainings.verdicts = cured_by_trl
    status, said = watch("--as-of", "2026-06-11", "--since", "2026-06-10")
    assert status == 1
    assert "cured: trl 1.1.0 alone: grpo-x, TRL's own trainer under ddp: ok, predicted silent" in said
    assert "trl 1.1.0 fixed grpo-x (silent with 1.0.0)" in said
    assert trainings.bisected == []  # both sides were measured, and nothing lies between
    folder = checkout.day(TODAY)
    assert "## Cured" in (folder / "report.md").read_text()
    assert "Cured" in (folder / "report.html").read_text()
    assert not (folder / "changes.patch").exists()  # of a past
    assert [path.name for path in (folder / "upstream").iterdir()]


def test_what_broke_is_bisected_until_that_finds_something(
    watch: Watch, trainings: Trainings, checkout: WatchLayout
) -> None:
    trainings.verdicts = lambda versions: [
        record("broken" if versions["accelerate"] == "1.1.0" else "ok", "ok", issue="grpo-x", subject="upstream")
    ]
    (issue,) = known_issues.load().values()
    right = dataclasses.replace(issue.predictions[-1], verdict=Verdict.OK)
    known_issues.load()["grpo-x"] = dataclasses.replace(issue, predictions=(right,))
    assert watch("--as-of", "2026-06-11", "--since", "2026-06-10")[0] == 1
    (command,) = trainings.bisected
    assert command[command.index("releases") :][:5] == ["releases", "--package", "accelerate", "--rest", "fixed"]
    assert (command[command.index("--good") + 1], command[command.index("--bad") + 1]) == ("1.0.0", "1.1.0")
    assert "trl=1.0.0" in command
    assert "transformers=5.1.0" in command
    _, said = watch("--as-of", "2026-06-11", "--since", "2026-06-10")
    assert len(trainings.bisected) == 2  # it found nothing, so that it is tried again
    assert "not reached: the bisection of grpo-x" in said
    assert "found nothing, and is tried again: it ended with exit status 2" in said
    assert "Bisecting it found nothing" in (checkout.day(TODAY) / "report.md").read_text()


def test_what_was_not_reached_is_said_and_done_by_the_next_command(
    watch: Watch, trainings: Trainings, checkout: WatchLayout
) -> None:
    trainings.verdicts = silent
    trainings.before_each = lambda cell: signal.raise_signal(signal.SIGALRM) if "accelerate1.0.0" in cell else None
    status, said = watch("--minutes", "60")
    assert status == 2
    assert "60 minutes are over; the same command goes on" in said
    assert "not reached: trl1.1.0-tf5.0.0-accelerate1.0.0 (trl 1.1.0 alone) is not finished" in said
    assert trainings.ran == ["trl1.0.0-tf5.0.0", "trl1.1.0-tf5.1.0"]
    raw = json.loads((checkout.day(TODAY) / "report.json").read_text())
    assert raw["complete"] is False
    trainings.before_each = lambda cell: None
    _, said = watch()
    assert "not reached" not in said
    assert trainings.ran.count("trl1.1.0-tf5.1.0") == 1


def test_out_of_time_before_the_first_cell_is_no_success(watch: Watch, trainings: Trainings) -> None:
    trainings.verdicts = silent
    trainings.before_each = lambda cell: signal.raise_signal(signal.SIGALRM)
    status, said = watch("--minutes", "60")
    assert (status, trainings.ran) == (2, [])
    assert said.count("  not reached: ") == 4
    assert "not all of the plan was measured; the same command goes on with what is missing" in said


def test_a_plan_that_cannot_be_built_is_no_success(watch: Watch, trainings: Trainings, checkout: WatchLayout) -> None:
    trainings.verdicts = lambda versions: []
    trainings.state, trainings.reason = UNTESTABLE, "there is no wheel"
    status, said = watch()
    assert status == 2
    assert "not reached: trl1.1.0-tf5.1.0 (the newest of all) is untestable: there is no wheel" in said
    assert json.loads((checkout.day(TODAY) / "report.json").read_text())["complete"] is False


def test_what_was_measured_with_other_code_is_measured_again(
    watch: Watch, trainings: Trainings, checkout: WatchLayout
) -> None:
    trainings.verdicts = silent
    assert watch()[0] == 0
    first = list(trainings.ran)
    checkout.suites.mkdir()
    (checkout.suites / "test_x.py").write_text("other code")
    trainings.before_each = lambda cell: signal.raise_signal(signal.SIGALRM) if "accelerate1.1.0" in cell else None
    status, said = watch("--minutes", "60")
    assert status == 2
    assert "trl1.1.0-tf5.1.0: was measured with other code; it is measured again" in said
    assert trainings.ran == [*first, *first[:3]]
    assert json.loads((checkout.day(TODAY) / "report.json").read_text())["cells"].keys() == set(first)
    trainings.before_each = lambda cell: None
    assert watch()[0] == 0
    assert trainings.ran == [*first, *first]


def test_verdicts_of_other_code_do_not_count_until_they_are_measured_again(
    watch: Watch, trainings: Trainings, checkout: WatchLayout
) -> None:
    trainings.verdicts = silent
    assert watch()[0] == 0
    checkout.suites.mkdir()
    (checkout.suites / "test_x.py").write_text("other code")
    trainings.before_each = lambda cell: signal.raise_signal(signal.SIGALRM)
    status, said = watch("--minutes", "60")
    assert status == 2
    assert "2 new releases, 1 cell, 1 verdict;" in said  # of the cell that was stopped
    assert "not reached: trl1.1.0-tf5.1.0 (the newest of all) was measured with other code, and not again" in said


def test_a_past_sweep_is_what_makes_a_release_known(watch: Watch, checkout: WatchLayout) -> None:
    """That the matrix has a cell of it does not: Transformers 5.24.0 had one, and nobody had run it."""
    checkout.evidence.write_text(checkout.evidence.read_text().replace('"before"', '"trl1.0.0-tf5.0.0"'))
    text = checkout.matrix.read_text()
    checkout.matrix.write_text(
        text + text[text.index("[[cell]]") :].replace("5.0.0", "5.1.0").replace("06-01", "06-06")
    )
    status, said = watch("--list", "--package", "transformers", today=datetime.date(2026, 6, 9))
    assert status == 0
    assert "new as of 2026-06-09: transformers 5.0.1 (2026-06-06), transformers 5.1.0 (2026-06-05)" in said


def test_of_what_no_sweep_has_measured_nothing_is_called_known(watch: Watch, checkout: WatchLayout) -> None:
    checkout.evidence.write_text(Evidence("2026-06-01").to_json())
    with pytest.raises(MatrixError) as raised:
        watch(today=datetime.date(2026, 6, 2))
    assert str(raised.value) == (
        "what is new cannot be said: trl was measured by no published sweep, accelerate was measured by no published "
        "sweep"
    )
    checkout.evidence.unlink()
    with pytest.raises(MatrixError, match="nothing is known to be measured, so that nothing can be called new"):
        watch(today=datetime.date(2026, 6, 2))


def test_ctrl_c_keeps_what_is_finished(watch: Watch, trainings: Trainings, checkout: WatchLayout) -> None:
    trainings.verdicts = silent

    def interrupt(cell: str) -> None:
        if "accelerate1.0.0" in cell:
            raise KeyboardInterrupt

    trainings.before_each = interrupt
    with pytest.raises(KeyboardInterrupt):
        watch()
    trainings.before_each = lambda cell: None
    assert watch()[0] == 0
    assert trainings.ran.count("trl1.1.0-tf5.1.0") == 1


def test_with_the_disk_full_nothing_more_is_built(
    watch: Watch, trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([10_000_000_000])
    monkeypatch.setattr(disk, "available", lambda layout: next(free, 1))
    _, said = watch("--gigabytes", "1")
    assert trainings.ran == []
    assert "not run, since 1 GB are used" in said
    assert said.count("  not reached: ") == 4


def test_the_plan_can_be_seen_without_running_it(watch: Watch, trainings: Trainings, checkout: WatchLayout) -> None:
    status, said = watch("--list")
    assert (status, trainings.ran) == (0, [])
    assert "trl1.1.0-tf5.1.0: the newest of all" in said
    assert not checkout.day(TODAY).exists()


def test_a_message_and_status_2_where_the_arguments_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--minutes", "0"]) == 2
    assert "--minutes 0: must be more than nothing" in capsys.readouterr().err


def test_nothing_is_left_below_the_checkout_but_in_build(
    watch: Watch, trainings: Trainings, checkout: WatchLayout
) -> None:
    def files() -> set[Path]:
        return {path for path in checkout.root.rglob("*") if "build" not in path.parts and ".nox" not in path.parts}

    before = files()
    watch()
    assert files() == before
