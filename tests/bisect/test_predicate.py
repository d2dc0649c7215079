"""Predicates: what is observed of a suite, a pytest test or a command, however it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.accelerator.artefacts import Artefact, What
from pytest_trlcompat.bisect import predicate as predicate_module
from pytest_trlcompat.bisect.candidates import ExecutionContext
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.failure_signature import FailureSignature, judge
from pytest_trlcompat.bisect.observation import Fingerprint
from pytest_trlcompat.bisect.predicate import CommandPredicate, IssuePredicate, PytestPredicate
from pytest_trlcompat.bisect.search import Answer
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.layout import Layout

TRACEBACK = 'Traceback (most recent call last):\n  File "/e/site-packages/trl/x.py", line 3, in f\nValueError: 3 of 4\n'


@pytest.fixture
def context(tmp_path: Path) -> ExecutionContext:
    return ExecutionContext(None, tmp_path)


def test_a_command_that_succeeds_is_good(context: ExecutionContext, tmp_path: Path) -> None:
    seen = CommandPredicate("true", tmp_path).observe(context, tmp_path / "work")
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
    context: ExecutionContext, tmp_path: Path, command: str, failure: Fingerprint
) -> None:
    seen = CommandPredicate(command, tmp_path).observe(context, tmp_path / "work")
    found = seen.failed["command"]
    assert (found.kind, found.message) == (failure.kind, failure.message)


@pytest.mark.parametrize(
    "command, reason",
    [
        ("echo not now; exit 125", "the command asked to skip this candidate (exit status 125): not now"),
        ("/no/such/program", "the command could not be started (exit status 127): "),
    ],
)
def test_a_command_that_asks_to_skip_or_cannot_start_is_inconclusive(
    context: ExecutionContext, tmp_path: Path, command: str, reason: str
) -> None:
    seen = CommandPredicate(command, tmp_path).observe(context, tmp_path / "work")
    assert not seen.conclusive
    assert seen.reason.startswith(reason)


def test_a_command_that_does_not_end_is_a_hang_and_doubtful(context: ExecutionContext, tmp_path: Path) -> None:
    seen = CommandPredicate("sleep 60", tmp_path, timeout=0.3).observe(context, tmp_path / "work")
    assert dict(seen.failed) == {"command": Fingerprint("hang", "did not end within 0.3 s")}
    assert seen.doubt == 0.1


def test_the_files_that_a_command_names_are_part_of_its_digest(tmp_path: Path) -> None:
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


def test_pytest_tests_are_checks(context: ExecutionContext, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    seen = PytestPredicate("test_it.py -p no:trlcompat", tmp_path).observe(context, tmp_path / "work")
    assert dict(seen.passed) == {"test_it::test_good": "passed"}
    assert dict(seen.inconclusive) == {"test_it::test_absent": "no trainer"}
    assert seen.failed["test_it::test_bad"].kind == "AssertionError"
    assert seen.failed["test_it::test_bad"].message == "assert N < N"
    assert seen.failed["test_it::test_error"].message == "no such device here"


def test_a_test_module_that_cannot_be_imported_is_a_failure(context: ExecutionContext, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import no_such_module_at_all\n")
    seen = PytestPredicate("test_it.py -p no:trlcompat", tmp_path).observe(context, tmp_path / "work")
    (failure,) = seen.failed.values()
    assert failure == Fingerprint(
        "ModuleNotFoundError", "No module named 'no_such_module_at_all'", ("test_it.py:<module>",)
    )


def test_a_selection_without_tests_is_inconclusive(context: ExecutionContext, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    seen = PytestPredicate("test_it.py -k nothing -p no:trlcompat", tmp_path).observe(context, tmp_path / "work")
    assert seen.reason.startswith("pytest collected no test: ")


def test_arguments_that_pytest_refuses_end_the_search(context: ExecutionContext, tmp_path: Path) -> None:
    with pytest.raises(BisectError, match="--pytest 'nowhere.py -p no:trlcompat': pytest does not accept this: "):
        PytestPredicate("nowhere.py -p no:trlcompat", tmp_path).observe(context, tmp_path / "work")


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
def test_a_command_that_fails_at_a_limit_of_the_accelerator_is_inconclusive(
    context: ExecutionContext, tmp_path: Path, body: str
) -> None:
    (tmp_path / "check.py").write_text(f"{LAUNCH}\n{body}\n")
    seen = CommandPredicate(f"{sys.executable} check.py", tmp_path).observe(context, tmp_path / "work")
    assert (dict(seen.passed), dict(seen.failed)) == ({}, {})
    judged = judge(seen, FailureSignature({"command": Fingerprint("ValueError")}))
    assert judged.answer is Answer.INCONCLUSIVE
    assert judged.why.startswith("This is a limit of the software accelerator (operator aten::foo for npu")


def test_a_command_that_handles_such_a_limit_and_then_fails_is_bad(context: ExecutionContext, tmp_path: Path) -> None:
    text = f"import traceback\ntry:\n    {KERNEL}\nexcept NotImplementedError:\n    traceback.print_exc()\nint('x')\n"
    (tmp_path / "check.py").write_text(text)
    seen = CommandPredicate(f"{sys.executable} check.py", tmp_path).observe(context, tmp_path / "work")
    assert seen.failed["command"].kind == "ValueError"


@pytest.mark.parametrize("body", ["launch()", KERNEL])
def test_a_test_that_fails_at_a_limit_of_the_accelerator_is_inconclusive(
    context: ExecutionContext, tmp_path: Path, body: str
) -> None:
    lines = f"{LAUNCH}\ndef test_it():\n    {body}\n\ndef test_other():\n    int('x')\n\ndef test_good():\n    pass\n"
    (tmp_path / "test_it.py").write_text(lines)
    seen = PytestPredicate("test_it.py -p no:trlcompat", tmp_path).observe(context, tmp_path / "work")
    assert list(seen.inconclusive) == ["test_it::test_it"]
    assert seen.inconclusive["test_it::test_it"].startswith(
        "This is a limit of the software accelerator (operator aten::foo"
    )
    assert seen.evidence["test_it::test_it"]["verdict"] == "untestable"
    assert {name: failure.kind for name, failure in seen.failed.items()} == {"test_it::test_other": "ValueError"}
    assert list(seen.passed) == ["test_it::test_good"]


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[IssuePredicate, ExecutionContext]]:
    """An issue's suite that ends with certain verdicts."""

    def fake(*records: Record) -> tuple[IssuePredicate, ExecutionContext]:
        lines = "".join(record.to_json() + "\n" for record in records)
        script = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); print('done', *sys.argv[3:])"
        monkeypatch.setattr(
            predicate_module,
            "suite_command",
            lambda environment, layout, results, issues: [sys.executable, "-c", script, str(results), lines],
        )
        (tmp_path / "work").mkdir(exist_ok=True)
        environment = Environment(tmp_path / "env")
        return IssuePredicate(Layout(tmp_path), "grpo-fsdp-ref-model"), ExecutionContext(environment, tmp_path)

    return fake


def record(strategy: str, verdict: Verdict, subject: str = "upstream", **evidence: object) -> Record:
    return Record("grpo-fsdp-ref-model", subject, strategy, verdict, None, dict(evidence))


def test_the_verdicts_of_upstreams_trainer_are_checks(
    suite: Callable[..., tuple[IssuePredicate, ExecutionContext]], tmp_path: Path
) -> None:
    predicate, context = suite(
        record("fsdp1", Verdict.OK),
        record("fsdp1", Verdict.BROKEN, subject="corrected"),
        record("a", Verdict.BROKEN, exception="RuntimeError", message="text"),
        record("b", Verdict.SILENT, error=0.3),
        record("c", Verdict.ERROR, exception="TypeError", message="f() takes 1", traceback=TRACEBACK),
        record("d", Verdict.HANG, launch="timed out"),
        record("e", Verdict.ABSENT, reason="no FSDP2 before 1.6"),
        record("f", Verdict.UNTESTABLE, reason=ARTEFACT.describe(), exception="NotImplementedError"),
    )
    seen = predicate.observe(context, tmp_path / "work")
    assert dict(seen.passed) == {"fsdp1": "ok"}
    assert dict(seen.inconclusive) == {
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


def test_a_strategy_pattern_chooses_among_the_checks(
    suite: Callable[..., tuple[IssuePredicate, ExecutionContext]], tmp_path: Path
) -> None:
    records = (record("fsdp1", Verdict.OK), record("fsdp1-no_shard", Verdict.OK), record("fsdp2", Verdict.BROKEN))
    predicate, context = suite(*records)
    seen = predicate.observe(context, tmp_path / "work")
    assert dict(seen.only("*").failed) == {"fsdp2": Fingerprint("broken")}
    chosen = seen.only("fsdp1*")
    assert (sorted(chosen.passed), dict(chosen.failed)) == (["fsdp1", "fsdp1-no_shard"], {})
    nothing = seen.only("zero3")
    assert not nothing.conclusive
    assert nothing.reason == "nothing was measured under 'zero3', only under fsdp1, fsdp1-no_shard, fsdp2"


def test_a_suite_without_verdicts_is_inconclusive(
    suite: Callable[..., tuple[IssuePredicate, ExecutionContext]], tmp_path: Path
) -> None:
    predicate, context = suite()
    assert predicate.observe(context, tmp_path / "work").reason == (
        "the suite gave no verdict (pytest ended with exit status 0): done --trlcompat-subject upstream"
    )


@pytest.mark.parametrize(
    "evidence",
    [
        {"exception": "TypeError", "message": "f() takes 1 of 2", "traceback": TRACEBACK},
        {"failures": {"train": "TypeError: f() takes 1 of 2 (in trl/x.py:f < trl/y.py:g)"}},
        {
            "type": "TypeError",
            "text": "f() takes 1 of 2",
            "traceback": TRACEBACK.replace("ValueError: 3", "TypeError: 3"),
        },
    ],
)
def test_a_failure_is_the_same_whether_the_catalogue_explains_it_or_not(
    suite: Callable[..., tuple[IssuePredicate, ExecutionContext]], tmp_path: Path, evidence: dict[str, Any]
) -> None:
    """Candidates on either side of a wrong bound of the issue that blocks."""
    named = {"blocked_by": "grpo-evaluate", "symptoms_of": ["grpo-evaluate"], **evidence}
    predicate, context = suite(record("a", Verdict.BLOCKED, **named), record("b", Verdict.ERROR, **evidence))
    seen = predicate.observe(context, tmp_path / "work")
    assert seen.failed["a"] == seen.failed["b"]
    assert seen.failed["a"].kind == "TypeError"
    assert seen.failed["a"].frames[0] == "trl/x.py:f"
    assert seen.evidence["a"]["blocked_by"] == "grpo-evaluate"
    other = judge(seen.only("b"), FailureSignature({"b": seen.failed["a"]}))
    assert other.answer is Answer.BAD
