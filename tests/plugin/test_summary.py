"""The end of a pytest run with verdicts: that upstream is broken is the last thing said, although the tests pass."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pytest_trlcompat.catalog.verdict import Record, Verdict

from .running import Run

VERDICTS = [
    Record("grpo-a", "upstream", "zero3", Verdict.BROKEN, Verdict.BROKEN),
    Record("grpo-a", "upstream", "single", Verdict.SILENT, Verdict.SILENT),
    Record("grpo-a", "corrected", "single", Verdict.OK, Verdict.OK),
    Record("grpo-b", "upstream", "single", Verdict.UNTESTABLE, Verdict.OK, {"reason": "no kernel"}),
]
CONCLUSION = [
    "Upstream is broken: 1 known issue affects TRL's own trainers",
    "1 silent, 1 broken",
    "A test passes where its verdict is the predicted one, also where that is broken.",
    "Corrected trainers: 1 ok",
]
SUITE = """
import pytest

@pytest.mark.parametrize("text", {texts!r})
def test_verdict(record_property, text):
    record_property("trlcompat", text)
    if '"untestable"' in str(text):
        pytest.skip("no kernel")

def test_other(record_property):
    record_property("somebody", "else")
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE.format(texts=[record.to_json() for record in VERDICTS]))


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize("arguments", [(), ("-q",), ("-p", "xdist", "-n2"), ("-p", "xdist", "-n0"), ("-ra", "-v")])
def test_a_run_in_which_upstream_is_broken_says_so_in_its_last_lines(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    result.assert_outcomes(passed=4, skipped=1)
    lines = result.outlines
    start = next(number for number, line in enumerate(lines) if " known issues ===" in line)
    assert lines[start + 1 : -1] == [
        "1 cell, 4 verdicts: all as predicted, 1 untestable",
        "",
        "trl 0.15.2, transformers 4.48.3  1 silent, 1 broken              corrected: 1 ok",
        "  silent   grpo-a (single)",
        "  broken   grpo-a (zero3)",
        "",
        "1 untestable: no kernel",
        "the evidence is kept with: --trlcompat-results FILE",
        *CONCLUSION,
    ]
    assert "4 passed" in lines[-1]


@pytest.mark.fault(
    "Another plugin records a property of our name that is no verdict.",
    "The end of the run names it, and says of every verdict what it would say without it.",
)
def test_a_property_that_is_no_verdict_is_named(run: Run, pytester: pytest.Pytester) -> None:
    texts = ["\x1b[2J", {"a": 1}, "[" * 50_000, VERDICTS[0].to_json()]
    pytester.makepyfile(SUITE.format(texts=texts))
    result = run()
    result.assert_outcomes(passed=5)
    text = "\n".join(result.outlines)
    assert [line[:46] for line in result.outlines if line.startswith("trlcompat: not a verdict line")] == [
        "trlcompat: not a verdict line (it is not JSON:",
        "trlcompat: not a verdict line (it is not JSON ",
    ]
    assert "\x1b" not in text
    assert "1 cell, 1 verdict: all as predicted" in text


@pytest.mark.usefixtures("suite")
def test_with_qq_the_conclusion_is_said_all_the_same(run: Run) -> None:
    lines = [line for line in run("-qq").outlines if line]
    assert lines[-4:] == CONCLUSION
    assert not any("as predicted" in line or "known issues ===" in line for line in lines)


@pytest.mark.usefixtures("suite")
def test_the_evidence_is_where_it_was_asked_for(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    assert f"Every verdict and its evidence: {path}" in run(f"--trlcompat-results={path}").outlines


def test_a_failing_run_names_what_is_not_as_predicted(run: Run, pytester: pytest.Pytester) -> None:
    surprise = Record("grpo-a", "upstream", "ddp", Verdict.SILENT, Verdict.OK)
    pytester.makepyfile(SUITE.format(texts=[surprise.to_json()]) + "\n\ndef test_fails():\n    assert 0\n")
    result = run("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    lines = result.outlines
    failures = next(number for number, line in enumerate(lines) if line.startswith("FAILED"))
    start = next(number for number, line in enumerate(lines) if " known issues ===" in line)
    assert failures < start
    assert lines[start + 1 : start + 3] == [
        "1 cell, 1 verdict: 1 not as predicted",
        "  grpo-a, upstream, ddp: silent, predicted ok",
    ]


def test_a_run_without_verdicts_ends_as_ever(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_one(record_property):\n    record_property('trlcompat.other', 1)\n")
    lines = run().outlines
    assert not any("known issues ===" in line or "as predicted" in line for line in lines)
    assert lines[-1].startswith("=")
    assert "1 passed" in lines[-1]


@pytest.mark.usefixtures("suite")
def test_what_the_matrix_alone_has_is_not_needed(pytester: pytest.Pytester, installed: Path) -> None:
    """``rich`` and ``jinja2`` are not installed where users run the plugin."""
    blocked = "import sys\nsys.modules['rich'] = sys.modules['jinja2'] = None\n"
    (installed / "sitecustomize.py").write_text(blocked)
    result = pytester.run(sys.executable, "-m", "pytest", "-p", "trlcompat", "-p", "no:cacheprovider")
    assert result.ret == 0
    assert CONCLUSION[0] in result.outlines


@pytest.mark.usefixtures("suite")
def test_verdicts_are_coloured_in_a_terminal(run: Run) -> None:
    text = "\n".join(run("--color=yes").outlines)
    assert "\x1b[31m\x1b[1mUpstream is broken" in text or "\x1b[1m\x1b[31mUpstream is broken" in text
    assert "\x1b[35m1 silent\x1b[0m" in text


def test_a_test_that_is_run_again_counts_once(run: Run, pytester: pytest.Pytester) -> None:
    first, second = (
        Record("grpo-a", "upstream", "single", verdict, Verdict.OK, {"n": number})
        for number, verdict in enumerate((Verdict.BROKEN, Verdict.OK))
    )
    pytester.makepyfile(SUITE.format(texts=[first.to_json(), second.to_json()]))
    lines = run().outlines
    assert "1 cell, 1 verdict: all as predicted" in lines
    assert "TRL's own trainers: no problem was found" in lines
    assert json.loads(first.to_json())["verdict"] == "broken"


def test_a_run_says_which_recorded_verdicts_were_not_taken_over(pytester: pytest.Pytester, run: Run) -> None:
    from pytest_trlcompat.plugin import judging, summary

    assert summary._MEASURED_AGAIN == judging.MEASURED_AGAIN
    whys = ["with other code", "with other packages", "with other code"]
    pytester.makepyfile(
        f"import pytest\n@pytest.mark.parametrize('n, why', {list(enumerate(whys))!r})\n"
        f"def test_again(record_property, n, why):\n    record_property({judging.MEASURED_AGAIN!r}, why)\n"
    )
    lines = run().outlines
    assert "trlcompat: 2 recorded verdicts were measured with other code, and measured again" in lines
    assert "trlcompat: 1 recorded verdict was measured with other packages, and measured again" in lines
