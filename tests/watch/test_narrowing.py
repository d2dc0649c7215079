"""From a change to a bisection's command, and what two cells say without one."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path

import pytest
from packaging.version import Version

from pytest_trlcompat.bisect.cli import main as bisect
from pytest_trlcompat.catalog.verdict import Record
from pytest_trlcompat.matrix import process
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.suite_run import code_digest
from pytest_trlcompat.watch.adjacent import measured_boundary
from pytest_trlcompat.watch.changes import Change, Verdicts, changes_in, verdicts_of
from pytest_trlcompat.watch.known import Known
from pytest_trlcompat.watch.layout import WatchLayout
from pytest_trlcompat.watch.narrowing import command_for, narrow, read_narrowed
from pytest_trlcompat.watch.plan import WatchedCell

from .made_up import ALL, DAY, TRL, cell_report, record, watched

BASE = Lock("base", datetime.date(2026, 6, 1), "3.11", {"trl": "1.0.0", "transformers": "5.0.0", "peft": "0.1.0"}, "")
KNOWN = Known({"trl": frozenset([Version("1.0.0")])}, BASE)
TOMORROW = DAY + datetime.timedelta(days=1)


def change(one: Record, cell: WatchedCell | None = None, base: Record | None = None) -> Change:
    cell = cell or watched(TRL)
    (found,) = changes_in([cell], {cell.cell.id: cell_report(cell, one)}, given(base))
    return found


def given(base: Record | None) -> Verdicts:
    return verdicts_of(cell_report(ALL, base)) if base is not None else {}


def command(one: Change, *clones: str) -> list[str]:
    found = command_for(one, KNOWN, TOMORROW, clones, Path("kept"))
    assert isinstance(found, list), found
    return found


def test_a_release_alone_is_searched_from_the_one_before_with_the_rest_held() -> None:
    found = command(change(record("silent")))
    assert found[: found.index("--state")] == [
        *("releases", "--package", "trl", "--rest", "fixed", "--with", "transformers=5.0.0", "peft=0.1.0"),
        *("--good", "1.0.0", "--bad", "1.1.0", "--issue", "grpo-token-normalizer", "--strategy", "ddp"),
    ]


def test_a_cure_is_searched_the_other_way_and_clones_go_on_to_the_commit() -> None:
    found = command(change(record("ok", "silent")), "trl=../trl")
    assert found[found.index("--good") :][:5] == ["--good", "1.1.0", "--bad", "1.0.0", "--find-fix"]
    assert found[found.index("--clone") + 1] == "trl=../trl"


def test_what_only_all_together_show_is_searched_by_days() -> None:
    found = command(change(record("silent"), ALL))
    assert found[:5] == ["days", "--good", "2026-06-01", "--bad", "2026-06-11"]


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (record("broken", "silent"), "it was a problem before as well"),
        (record("silent", subject="corrected"), "runs TRL's own trainer"),
    ],
)
def test_what_is_not_searched(one: Record, why: str) -> None:
    found = command_for(change(one), KNOWN, TOMORROW, (), Path("kept"))
    assert isinstance(found, str)
    assert why in found


def test_without_an_older_release_there_is_nothing_to_search() -> None:
    one = change(record("silent"), dataclasses.replace(watched(TRL), previous=""))
    assert command_for(one, KNOWN, TOMORROW, (), Path("kept")) == "no older release of trl is known"


def test_the_bisection_understands_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It refuses an unknown issue, the last of its checks of the arguments."""
    words = command(dataclasses.replace(change(record("silent", issue="grpo-no-such-issue"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_trlcompat.bisect.commands._find_release_day", lambda *arguments: None)
        assert bisect([*words, "--state", str(tmp_path)]) == 2
    assert "unknown issue 'grpo-no-such-issue'" in capsys.readouterr().err


@pytest.fixture
def layout(tmp_path: Path) -> WatchLayout:
    return WatchLayout(tmp_path, tmp_path / "build" / "watch")


def test_a_bisections_result_is_read_and_not_searched_again(
    layout: WatchLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = change(record("silent"))
    words = command_for(one, KNOWN, TOMORROW, (), layout.bisections)
    assert isinstance(words, list)
    runs: list[list[str]] = []

    def run(arguments: list[str], **options: object) -> int:
        runs.append(arguments)
        culprit = {"package": "trl", "last_good": "1.0.0", "first_bad": "1.1.0", "inconclusive": ["1.0.1", "1.0.2"]}
        raw = {"command": "trlcompat bisect ...", "verdict": "trl 1.1.0 broke it", "culprit": culprit}
        Path(words[words.index("--json") + 1]).parent.mkdir(parents=True, exist_ok=True)
        Path(words[words.index("--json") + 1]).write_text(json.dumps(raw))
        Path(words[words.index("--report") + 1]).write_text("# to paste")
        return 0

    monkeypatch.setattr(process, "run", run)
    for _ in range(2):
        found = narrow(one, words, layout, lambda text: None)
        assert (found.verdict, found.package, found.before, found.after) == (
            "trl 1.1.0 broke it",
            "trl",
            "1.0.0",
            "1.1.0",
        )
        assert (found.report, found.between) == ("# to paste", 2)
    assert len(runs) == 1
    (layout.root / "suites").mkdir()
    (layout.root / "suites" / "test_x.py").write_text("other code")
    assert read_narrowed(one, layout.bisections, code_digest(layout)) is None
    narrow(one, words, layout, lambda text: None)
    assert len(runs) == 2


def test_a_bisection_of_which_nobody_wrote_down_the_code_is_not_taken(layout: WatchLayout) -> None:
    one = change(record("silent"))
    layout.bisections.mkdir(parents=True)
    (layout.bisections / f"{one.key}.json").write_text(json.dumps({"command": "x", "reason": "the network"}))
    assert read_narrowed(one, layout.bisections, code_digest(layout)) is None


def test_why_a_bisection_found_nothing_is_kept(layout: WatchLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    one = change(record("silent"))

    def run(arguments: list[str], *, output: object, **options: object) -> int:
        output.write(b"trlcompat bisect: good 1.0.0 is bad as well\n")  # type: ignore[attr-defined]
        return 2

    monkeypatch.setattr(process, "run", run)
    words = ["releases", "--issue", "x", "--json", "/home/somebody/x.json"]
    found = narrow(one, words, layout, lambda text: None)
    assert not found.found
    assert found.reason == "trlcompat bisect: good 1.0.0 is bad as well"
    assert found.command == "trlcompat bisect releases --issue x"  # without this machine's files
    assert read_narrowed(one, layout.bisections, code_digest(layout)) == found
    monkeypatch.undo()
    again: list[object] = []

    def run_again(arguments: list[str], **options: object) -> int:
        again.append(arguments)
        return 2

    monkeypatch.setattr(process, "run", run_again)
    narrow(one, words, layout, lambda text: None)
    assert len(again) == 1  # it may have been the network: it is tried again


def test_a_stopped_bisection_has_found_nothing_yet(layout: WatchLayout) -> None:
    assert read_narrowed(change(record("silent")), layout.bisections, code_digest(layout)) is None


LOCK = {**BASE.packages, "trl": "1.1.0"}
CURED, BEFORE = record("ok", "silent"), record("silent", "silent")
RELEASES = [Version("1.0.0"), Version("1.1.0")]


def test_two_cells_with_nothing_between_have_measured_the_boundary() -> None:
    found = measured_boundary(change(CURED, base=BEFORE), BASE, given(BEFORE), LOCK, RELEASES)
    assert found is not None
    assert found.verdict == "trl 1.1.0 fixed grpo-token-normalizer (silent with 1.0.0)"
    assert (found.package, found.before, found.after) == ("trl", "1.0.0", "1.1.0")
    assert "-trl==1.0.0\n+trl==1.1.0" in found.report


def test_what_moved_beside_it_is_said() -> None:
    found = measured_boundary(change(CURED, base=BEFORE), BASE, given(BEFORE), {**LOCK, "peft": "0.2.0"}, RELEASES)
    assert found is not None
    assert found.verdict.endswith("; beside it moved peft 0.1.0 to 0.2.0")


def test_otherwise_a_search_is_needed() -> None:
    between = [*RELEASES, Version("1.0.5")]
    cured = change(CURED, base=BEFORE)
    assert measured_boundary(cured, BASE, given(BEFORE), LOCK, between) is None
    assert measured_boundary(cured, BASE, {}, LOCK, RELEASES) is None  # nobody has measured the release before
    # An alarm is seen twice.
    broke = change(record("silent"), base=record("ok"))
    assert measured_boundary(broke, BASE, given(record("ok")), LOCK, RELEASES) is None
    assert measured_boundary(change(CURED, ALL, BEFORE), BASE, given(BEFORE), LOCK, RELEASES) is None
