"""The setting ``trlcompat_preload`` in a run, and what the header says of it."""

from __future__ import annotations

import re

import pytest

from .running import PLUGIN


def test_the_header_says_what_preloading_cost(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(trlcompat_mine="import time\ntime.sleep(0.3)\n")
    pytester.makepyfile(
        test_it="""
        import sys

        def test_it(launcher):
            assert launcher(lambda: "trlcompat_mine" in sys.modules, strategy="single").values == [True]
        """
    )
    pytester.makeini("[pytest]\ntrlcompat_preload = trlcompat_mine\npythonpath = .\n")

    def header() -> str:
        result = pytester.runpytest_inprocess("-p", PLUGIN, "--trlcompat-device=cpu")
        result.assert_outcomes(passed=1)
        (line,) = [line for line in result.outlines if line.startswith("trlcompat: preloads")]
        return line

    assert header() == "trlcompat: preloads trlcompat_mine (new)"
    found = re.fullmatch(r"trlcompat: preloads trlcompat_mine \((\d+\.\d) s in the last run\)", header())
    assert found is not None
    assert float(found[1]) >= 0.3


def test_a_name_that_is_no_module_is_refused(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    result = pytester.runpytest_inprocess("-p", PLUGIN, "--trlcompat-preload=my-project")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: trlcompat: option --trlcompat-preload: invalid value *my-project*; write the name of a module*"]
    )
