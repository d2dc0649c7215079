"""The marker ``known_issue`` and the option ``--trlcompat-issue``, through pytester."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

SUITE = """
    import pytest
    from pytest_trlcompat.plugin.judging import Finding
    from pytest_trlcompat.catalog.verdict import Verdict

    @pytest.mark.known_issue("grpo-logits-to-keep")
    def test_logits(judge):
        judge(lambda: Finding(Verdict.OK, {"n": 1}), subject="corrected", strategy="single")

    @pytest.mark.known_issue("grpo-fsdp-ref-model")
    def test_reference(judge):
        judge(lambda: Finding(Verdict.BROKEN), subject="corrected", strategy="fsdp1")

    def test_other():
        pass
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """pytest with this plugin and no other, in this process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return lambda *arguments: pytester.runpytest_inprocess("-p", "pytest_trlcompat.plugin", *arguments)


def test_each_issue_by_itself_and_the_lines_it_leaves(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(SUITE)
    result = run("--trlcompat-issue", "grpo-logits-to-keep", "--trlcompat-results", "out.jsonl")
    result.assert_outcomes(passed=1, deselected=2)
    (line,) = (pytester.path / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["evidence"] == {"n": 1}


SUBJECTS = """
    import pytest
    from pytest_trlcompat.plugin.judging import Finding
    from pytest_trlcompat.catalog.verdict import Verdict

    @pytest.mark.known_issue("grpo-logits-to-keep")
    @pytest.mark.parametrize("subject", ["upstream", "corrected"])
    def test_upstream_and_corrected(judge, subject):
        judge(lambda: Finding(Verdict.OK), subject=subject, strategy="single")

    @pytest.mark.known_issue("trl-training-arguments")
    @pytest.mark.parametrize("subject", ["upstream"])
    def test_alone(judge, subject):
        judge(lambda: Finding(Verdict.OK), subject=subject, strategy="single")

    def test_other_upstream():
        pass
"""


@pytest.mark.parametrize(
    ("subject", "measured"),
    [
        ("upstream", [("grpo-logits-to-keep", "upstream"), ("trl-training-arguments", "upstream")]),
        ("corrected", [("grpo-logits-to-keep", "corrected")]),
    ],
)
def test_the_subject_is_chosen_by_its_parameter_and_by_no_name(
    pytester: pytest.Pytester, run: Run, subject: str, measured: list[tuple[str, str]]
) -> None:
    pytester.makepyfile(SUBJECTS)
    result = run("--trlcompat-subject", subject, "--trlcompat-results", "out.jsonl")
    result.assert_outcomes(passed=len(measured) + 1, deselected=3 - len(measured))  # tests of no known issue stay
    lines = [json.loads(line) for line in (pytester.path / "out.jsonl").read_text().splitlines()]
    assert [(line["issue"], line["subject"]) for line in lines] == measured


def test_a_suite_without_a_subject_is_refused_if_one_is_requested(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(SUITE)
    result = run("--trlcompat-subject", "corrected")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*::test_logits shows a known issue but has no parameter subject, *"])


def test_a_wrong_verdict_fails_and_resuming_does_not_measure_again(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(SUITE)
    for more in ((), ("--trlcompat-resume",)):
        result = run("--trlcompat-results", "out.jsonl", *more)
        result.assert_outcomes(passed=2, failed=1)
        result.stdout.fnmatch_lines(["grpo-fsdp-ref-model, corrected, fsdp1: the verdict is broken; *"])
    assert len((pytester.path / "out.jsonl").read_text().splitlines()) == 2


def test_an_unknown_issue_is_refused(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(SUITE)
    result = run("--trlcompat-issue", "grpo")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*option --trlcompat-issue: unknown issue 'grpo'; known are *"])


def test_a_marker_without_an_issue_is_refused(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.known_issue('nothing')\ndef test_one(): pass\n")
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*::test_one: unknown issue 'nothing'; known are *"])


def test_judge_needs_the_marker(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile("def test_one(judge): pass\n")
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_one: fixture judge needs @pytest.mark.known_issue(id)*"])


@pytest.mark.fault(
    "The disk is full when a suite's verdict is to be written.",
    "The session ends at once, and says which verdict is missing and that the command can be repeated.",
)
def test_a_verdict_that_cannot_be_written_ends_the_session(pytester: pytest.Pytester, run: Run) -> None:
    """``/dev/full`` refuses every byte as a full disk does."""
    pytester.makepyfile(SUITE)
    (pytester.path / "out.jsonl").symlink_to("/dev/full")
    result = run("--trlcompat-results", "out.jsonl")
    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    result.stdout.fnmatch_lines(
        [
            "*Exit: the verdict of grpo-logits-to-keep (corrected, single) cannot be written to */out.jsonl: No space "
            "left on device. Those before it are kept; the same command goes on after them*"
        ]
    )
    assert "test_reference" not in result.stdout.str()
