"""The report of a bisect holds no element of what a failure, a commit's author or a package says, and no secret."""

from __future__ import annotations

import datetime
import re
from dataclasses import replace

import pytest
from hypothesis import given

from pytest_trlcompat._escaping import one_line
from pytest_trlcompat.bisect.attribution import Attribution, Culprit
from pytest_trlcompat.bisect.bisector import ChangePoint
from pytest_trlcompat.bisect.candidates import Candidate
from pytest_trlcompat.bisect.candidates.commits import Commit
from pytest_trlcompat.bisect.cli import main
from pytest_trlcompat.bisect.failure_signature import FailureSignature
from pytest_trlcompat.bisect.observation import Fingerprint, Observation
from pytest_trlcompat.bisect.result import Result, markdown
from pytest_trlcompat.bisect.search import Answer
from pytest_trlcompat.bisect.session import Step
from pytest_trlcompat.matrix.locks import Lock
from tests.hostile import EVIL, Parsed, lines, rendered

from .fakes import ALL_RELEASES, RUN_CHECK, FakeRegistry, read_result, write_check

SECRET = "q7Zp-11kd_Xw"


def made(said: str, output: str, name: str = "") -> Result:
    """The result of a search for a commit.

    Args:
        said: in one line: by the author of the commit, by the exception, in a note.
        output: of the failing check.
        name: of a package.
    """
    before, after = (Candidate(f"c{n}", f"{n}" * 40, f"commit {n} {said}") for n in (1, 2))
    failure = Fingerprint("ValueError", said, ("a.py:f",))
    point = ChangePoint(before, after, "1", "2", (before,), 0.9, FailureSignature({"command": failure}), 4, 3, 1)
    locks = [
        Lock("cell", datetime.date(2025, 2, day), "3.11", {"trl": f"0.{day}", **({name: "1"} if name else {})}, "x")
        for day in (1, 2)
    ]
    culprit = Culprit(
        find_fix=False,
        package="trl",
        others=(said,),
        commits=point,
        commit=Commit("2" * 40, "2025-02-02", said),
        attribution=Attribution(("trl",), True, locks[1]),
        before_lock=locks[0],
        after_lock=locks[1],
        notes=[said],
    )
    bad = Observation(failed={"command": failure}, evidence={"command": {"output": output}})
    steps = [Step("commits", after, "2", Answer.BAD, said, bad, from_journal=False)]
    return Result({}, f"`python {said}`", f"trlcompat bisect --command '{output}'", culprit, steps, 1.0)


@pytest.mark.fuzz
@given(lines(), lines(), lines())
def test_the_report_has_no_element_of_what_others_said(said: str, output: str, name: str) -> None:
    hostile = Parsed(rendered(markdown(made(said, output, name))))
    assert hostile.without() == Parsed(rendered(markdown(made("word", "word", "word")))).without()
    assert not hostile.others
    assert hostile.text.split("\n")[0].count(one_line(said)) >= 2


def test_the_command_that_was_tested_is_code_in_the_heading() -> None:
    heading = markdown(made("a_b_", "x")).split("\n")[0]
    assert heading == (
        "# trl 2222222222 (a_b\\_), or the one before it, which is inconclusive, "
        "broke `python a_b_` (ValueError: a_b\\_ in a.py:f)"
    )
    evil = markdown(made(EVIL, "x")).split("\n")[0]
    assert "<img" not in re.sub(r"`{5}.*`{5}", "", evil)


@pytest.mark.fault(
    "A program that bisect runs prints a token from the environment, a URL with a password, and escape sequences.",
    "Journal, report, result and terminal hold none of them.",
)
def test_no_secret_reaches_what_a_bisect_keeps_or_says(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    text = f"{SECRET} at https://u:{SECRET}@host?token=abc \\x1b[2J"
    write_check(registry, f"if at_least('transformers', '4.52'): raise ValueError('{text}')")
    command = f"MY_API_KEY=abc-4defg {RUN_CHECK}"
    written = ("--state", "state", "--json", "result.json", "--report", "report.md")
    assert main([*ALL_RELEASES, "--command", command, *written]) == 0
    kept = [
        path for path in registry.folder.rglob("*") if path.is_file() and path.name not in ("check.py", "runs.jsonl")
    ]
    assert {"report.md", "result.json", "steps.jsonl"} <= {path.name for path in kept}
    said = "".join(capfd.readouterr())
    for shown in (said, *(path.read_text(encoding="utf-8") for path in kept)):
        assert SECRET not in shown
        assert "token=abc" not in shown
        assert "abc-4defg" not in shown
        assert "\x1b" not in shown
    assert (
        "ValueError: [redacted] at https://[redacted]@host?token=[redacted]"
        in (registry.folder / "report.md").read_text()
    )
    assert read_result(registry)["culprit"]["first_bad"] == "4.52.0"


def test_the_heading_names_no_single_commit_where_others_before_it_are_inconclusive() -> None:
    result = made("x", "x")
    ((name, point),) = result.culprit.change_points
    for count, said in (
        (0, "(x) broke"),
        (1, "which is inconclusive, broke"),
        (5, "one of the 5 before it, which are"),
    ):
        culprit = replace(result.culprit, commits=replace(point, inconclusive=(point.before,) * count))
        assert said in replace(result, culprit=culprit).headline, name
