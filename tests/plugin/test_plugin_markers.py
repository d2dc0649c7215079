"""Markers and known issues as a user meets them: what is skipped, selected and refused, in workers too."""

from __future__ import annotations

import pytest

from .running import Run


def test_the_marker_is_registered(run: Run) -> None:
    run("--markers").stdout.fnmatch_lines(["@pytest.mark.versions(trl='>=0.15', *"])


def test_the_marker_skips_with_its_reason_and_runs_where_the_ranges_hold(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.versions(transformers=">=4.49", reason="logits_to_keep arrived there", issue="trl#2770")
        def test_skipped():
            assert False

        @pytest.mark.versions(transformers="<4.50")
        class TestOld:
            def test_run(self):
                pass

            @pytest.mark.versions(peft=">=0.1")
            def test_not_installed(self):
                assert False
        """
    )
    result = run("-rs", "--strict-markers")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED * needs transformers>=4.49; found transformers 4.48.3: "
            "logits_to_keep arrived there [[]trl#2770[]]",
            "SKIPPED * needs peft>=0.1; found no peft",
        ]
    )


BAD_MARKERS = """
import pytest

@pytest.mark.versions(tlr=">=0.15")
def test_unknown():
    pass

@pytest.mark.versions(trl="newest")
def test_malformed():
    pass

def test_good():
    pass
"""
REFUSALS = [
    "test_bad.py::test_unknown: marker versions: unknown package 'tlr' in a version range; known are *",
    "test_bad.py::test_malformed: marker versions: malformed version range 'newest' for trl; *",
]


def test_markers_that_make_no_sense_are_refused_at_collection(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_bad=BAD_MARKERS)
    result = run()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*ERROR collecting test_bad.py*", *REFUSALS])
    result.assert_outcomes(errors=1)


def test_markers_that_another_plugin_adds_are_obeyed_and_checked_too(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_added(): assert False")
    conftest = "import pytest\ndef pytest_collection_modifyitems(items): items[0].add_marker(pytest.mark.versions({}))"
    pytester.makeconftest(conftest.format("trl='>=9'"))
    run().assert_outcomes(skipped=1)
    pytester.makeconftest(conftest.format("tlr='>=9'"))
    result = run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *::test_added: marker versions: unknown package 'tlr' *"])


def test_xdist_workers_skip_refuse_and_see_the_settings(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_bad=BAD_MARKERS,
        test_good="""
        import pytest
        from pytest_trlcompat.plugin import settings

        @pytest.mark.versions(trl=">=9")
        def test_skipped():
            assert False

        def test_settings(pytestconfig):
            device = pytestconfig.stash[settings.KEY].device
            assert (device.value, device.where) == ("cpu", "option --trlcompat-device")
            assert hasattr(pytestconfig, "workerinput")
        """,
    )
    result = run("-p", "xdist", "-n2", "--trlcompat-device=cpu")
    result.stdout.fnmatch_lines(["*ERROR collecting test_bad.py*", *REFUSALS])
    result.assert_outcomes(passed=1, skipped=1, errors=1)


ISSUES = """
import pytest

@pytest.mark.known_issue("grpo-logits-to-keep")
def test_logits():
    pass

@pytest.mark.known_issue("grpo-fsdp-ref-model")
def test_reference():
    pass

def test_plain():
    pass
"""


def test_issues_select_the_tests_that_show_them(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ISSUES)
    run().assert_outcomes(passed=3)
    run("--trlcompat-issue=grpo-logits-to-keep").assert_outcomes(passed=1, deselected=2)
    run("-p", "xdist", "-n2", "--trlcompat-issue=grpo-logits-to-keep").assert_outcomes(passed=1)


@pytest.mark.parametrize("xdist", [(), ("-p", "xdist", "-n2")], ids=["plain", "xdist"])
def test_unknown_issues_are_refused(run: Run, pytester: pytest.Pytester, xdist: tuple[str, ...]) -> None:
    pytester.makepyfile(ISSUES)
    result = run(*xdist, "--trlcompat-issue=nobody")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: trlcompat: option --trlcompat-issue: unknown issue 'nobody'; known are *"])
    assert run("--help", "--trlcompat-issue=nobody").ret == pytest.ExitCode.OK
    pytester.makepyfile(test_unknown="import pytest\n@pytest.mark.known_issue('nobody')\ndef test_it(): pass")
    result = run(*xdist)
    result.stdout.fnmatch_lines(["test_unknown.py::test_it: unknown issue 'nobody'; known are *"])
    result.assert_outcomes(errors=1, passed=0 if not xdist else 3)
