"""Predicates: what a suite, a pytest test or a command showed, whatever way it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_trlcompat.accelerator.artefacts import Artefact, What
from pytest_trlcompat.bisect import predicate as room
from pytest_trlcompat.bisect.candidates.base import Place
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.observation import Fingerprint
from pytest_trlcompat.bisect.predicate import CommandPredicate, IssuePredicate, PytestPredicate
from pytest_trlcompat.bisect.search import Answer
from pytest_trlcompat.bisect.standard import Standard, judge
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.layout import Layout

TRACEBACK = 'Traceback (most recent call last):\n  File "/e/site-packages/trl/x.py", line 3, in f\nValueError: 3 of 4\n'


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(None, tmp_path)


def test_a_command_that_ends_well_is_good(place: Place, tmp_path: Path) -> None:
    seen = CommandPredicate("true", tmp_path).observe(place, tmp_path / "work")
    assert (dict(seen.passed), dict(seen.failed)) == ({"command": "exit status 0"}, {})


@pytest.mark.parametrize(
    "command, failure",
    [
        ("exit 3", Fingerprint("exit status 3")),
        ("kill -11 $$", Fingerprint("signal 11")),
        (f"{sys.executable} -c 'int(\"x\")'", Fingerprint("ValueError", "invalid literal for int() with base N: 'x'")),
    ],
)
def test_a_command_that_fails_leaves_a_fingerprint(
    place: Place, tmp_path: Path, command: str, failure: Fingerprint
) -> None:
    seen = CommandPredicate(command, tmp_path).observe(place, tmp_path / "work")
    found = seen.failed["command"]
    assert (found.kind, found.message) == (failure.kind, failure.message)


@pytest.mark.parametrize(
    "command, reason",
    [
        ("echo not now; exit 125", "the command asked to skip (exit status 125): not now"),
        ("/no/such/program", "the command could not be started (exit status 127): "),
    ],
)
def test_a_command_that_cannot_tell(place: Place, tmp_path: Path, command: str, reason: str) -> None:
    seen = CommandPredicate(command, tmp_path).observe(place, tmp_path / "work")
    assert not seen.told
    assert seen.reason.startswith(reason)


def test_a_command_that_does_not_end_hangs_and_is_doubtful(place: Place, tmp_path: Path) -> None:
    seen = CommandPredicate("sleep 60", tmp_path, timeout=0.3).observe(place, tmp_path / "work")
    assert dict(seen.failed) == {"command": Fingerprint("hang", "did not end within 0.3 s")}
    assert seen.doubt == 0.1


def test_the_files_that_a_command_names_are_part_of_the_question(tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text("one")
    before = CommandPredicate("python check.py", tmp_path).digest
    assert CommandPredicate("python check.py", tmp_path).digest == before
    (tmp_path / "check.py").write_text("two")
    assert CommandPredicate("python check.py", tmp_path).digest != before


TESTS = """
import pytest
def test_good(): pass
def test_bad():
    loss = 0.25
    assert loss < 0.1
@pytest.mark.skip(reason="no trainer")
def test_absent(): pass
@pytest.fixture
def broken(): raise RuntimeError("no such device here")
def test_error(broken): pass
"""


def test_pytest_tests_are_checks(place: Place, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    seen = PytestPredicate("test_it.py -p no:trlcompat", tmp_path).observe(place, tmp_path / "work")
    assert dict(seen.passed) == {"test_it::test_good": "passed"}
    assert dict(seen.untold) == {"test_it::test_absent": "no trainer"}
    assert seen.failed["test_it::test_bad"].kind == "AssertionError"
    assert seen.failed["test_it::test_bad"].message == "assert N < N"
    assert seen.failed["test_it::test_error"].message == "no such device here"


def test_a_module_that_cannot_be_imported_is_a_failure_of_its_own(place: Place, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import no_such_module_at_all\n")
    seen = PytestPredicate("test_it.py -p no:trlcompat", tmp_path).observe(place, tmp_path / "work")
    (failure,) = seen.failed.values()
    assert failure == Fingerprint(
        "ModuleNotFoundError", "No module named 'no_such_module_at_all'", ("test_it.py:<module>",)
    )


def test_no_test_of_that_name_cannot_tell(place: Place, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    seen = PytestPredicate("test_it.py -k nothing -p no:trlcompat", tmp_path).observe(place, tmp_path / "work")
    assert seen.reason.startswith("pytest collected no test: ")


def test_what_pytest_does_not_understand_ends_the_search(place: Place, tmp_path: Path) -> None:
    with pytest.raises(BisectError, match="pytest does not understand --pytest 'nowhere.py"):
        PytestPredicate("nowhere.py -p no:trlcompat", tmp_path).observe(place, tmp_path / "work")


# ---- what the software accelerator cannot do

ARTEFACT = Artefact(What.OPERATOR, "aten::foo for npu", "it has no such kernel", "2.9.1")
LAUNCH = f"""
class LaunchError(Exception):
    pass

def launch():
    text = "launch of train failed; first observed failure: rank 0\\n{ARTEFACT.describe()}\\nTraceback of the rank"
    raise LaunchError(text)
"""
KERNEL = "raise NotImplementedError(\"Could not run 'aten::foo' with arguments from the 'npu' backend. This\")"


@pytest.mark.parametrize("body", ["launch()", KERNEL])
def test_a_command_that_the_accelerator_ends_cannot_tell(place: Place, tmp_path: Path, body: str) -> None:
    (tmp_path / "check.py").write_text(f"{LAUNCH}\n{body}\n")
    seen = CommandPredicate(f"{sys.executable} check.py", tmp_path).observe(place, tmp_path / "work")
    assert (dict(seen.passed), dict(seen.failed)) == ({}, {})
    judged = judge(seen, Standard({"command": Fingerprint("ValueError")}))
    assert judged.answer is Answer.UNKNOWN
    assert judged.why.startswith("This is a limit of the software accelerator (operator aten::foo for npu")


def test_a_command_that_has_dealt_with_it_and_fails_otherwise_is_bad(place: Place, tmp_path: Path) -> None:
    text = f"import traceback\ntry:\n    {KERNEL}\nexcept NotImplementedError:\n    traceback.print_exc()\nint('x')\n"
    (tmp_path / "check.py").write_text(text)
    seen = CommandPredicate(f"{sys.executable} check.py", tmp_path).observe(place, tmp_path / "work")
    assert seen.failed["command"].kind == "ValueError"


@pytest.mark.parametrize("body", ["launch()", KERNEL])
def test_a_test_that_the_accelerator_ends_cannot_tell(place: Place, tmp_path: Path, body: str) -> None:
    lines = f"{LAUNCH}\ndef test_it():\n    {body}\n\ndef test_other():\n    int('x')\n\ndef test_good():\n    pass\n"
    (tmp_path / "test_it.py").write_text(lines)
    seen = PytestPredicate("test_it.py -p no:trlcompat", tmp_path).observe(place, tmp_path / "work")
    assert list(seen.untold) == ["test_it::test_it"]
    assert seen.untold["test_it::test_it"].startswith("This is a limit of the software accelerator (operator aten::foo")
    assert seen.evidence["test_it::test_it"]["verdict"] == "untestable"
    assert {name: failure.kind for name, failure in seen.failed.items()} == {"test_it::test_other": "ValueError"}
    assert list(seen.passed) == ["test_it::test_good"]


Suite = Callable[..., IssuePredicate]


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[IssuePredicate, Place]]:
    """An issue's suite that leaves the given verdicts."""

    def play(*records: Record) -> tuple[IssuePredicate, Place]:
        lines = "".join(record.to_json() + "\n" for record in records)
        script = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); print('played')"
        monkeypatch.setattr(
            room,
            "suite_command",
            lambda environment, layout, results, issues: [sys.executable, "-c", script, str(results), lines],
        )
        (tmp_path / "work").mkdir(exist_ok=True)
        environment = Environment(tmp_path / "env")
        return IssuePredicate(Layout(tmp_path), "grpo-fsdp-ref-model"), Place(environment, tmp_path)

    return play


def record(strategy: str, verdict: Verdict, subject: str = "upstream", **evidence: object) -> Record:
    return Record("grpo-fsdp-ref-model", subject, strategy, verdict, None, dict(evidence))


def test_the_verdicts_of_upstream_are_checks(
    suite: Callable[..., tuple[IssuePredicate, Place]], tmp_path: Path
) -> None:
    asked, place = suite(
        record("fsdp1", Verdict.OK),
        record("fsdp1", Verdict.BROKEN, subject="corrected"),
        record("a", Verdict.BROKEN, exception="RuntimeError", message="text"),
        record("b", Verdict.SILENT, error=0.3),
        record("c", Verdict.ERROR, exception="TypeError", message="f() takes 1", traceback=TRACEBACK),
        record("d", Verdict.HANG, launch="timed out"),
        record("e", Verdict.ABSENT, reason="no FSDP2 before 1.6"),
        record("f", Verdict.UNTESTABLE, reason=ARTEFACT.describe(), exception="NotImplementedError"),
    )
    seen = asked.observe(place, tmp_path / "work")
    assert dict(seen.passed) == {"fsdp1": "ok"}
    assert dict(seen.untold) == {
        "e": "absent: no FSDP2 before 1.6",
        "f": f"untestable: {ARTEFACT.describe()}",
    }
    assert dict(seen.failed) == {
        "a": Fingerprint("broken"),
        "b": Fingerprint("silent"),
        "c": Fingerprint("TypeError", "f() takes N", ("trl/x.py:f",)),
        "d": Fingerprint("hang"),
    }
    assert seen.doubt == 0.1
    assert seen.evidence["b"] == {"verdict": "silent", "error": 0.3}


def test_a_strategy_chooses_among_them(suite: Callable[..., tuple[IssuePredicate, Place]], tmp_path: Path) -> None:
    records = (record("fsdp1", Verdict.OK), record("fsdp1-no_shard", Verdict.OK), record("fsdp2", Verdict.BROKEN))
    asked, place = suite(*records)
    seen = asked.observe(place, tmp_path / "work")
    assert dict(seen.only("*").failed) == {"fsdp2": Fingerprint("broken")}
    chosen = seen.only("fsdp1*")
    assert (sorted(chosen.passed), dict(chosen.failed)) == (["fsdp1", "fsdp1-no_shard"], {})
    nothing = seen.only("zero3")
    assert not nothing.told
    assert nothing.reason == "nothing was measured under 'zero3', but under fsdp1, fsdp1-no_shard, fsdp2"


def test_a_suite_without_verdicts_cannot_tell(
    suite: Callable[..., tuple[IssuePredicate, Place]], tmp_path: Path
) -> None:
    asked, place = suite()
    assert asked.observe(place, tmp_path / "work").reason == (
        "the suite gave no verdict (pytest ended with exit status 0): played"
    )
