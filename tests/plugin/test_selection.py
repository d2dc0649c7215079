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
