"""A rank ends a test, warns, logs and prints as the test itself would."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from .running import PLUGIN

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """pytest with this plugin in this process, launches on the CPU, and warnings as by default."""
    ours = ("-p", PLUGIN, "--trlcompat-device=cpu", "-p", "no:cacheprovider", "-W", "default")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in [name for name in os.environ if name.startswith("TRLCOMPAT_")]:
        monkeypatch.delenv(name)

    def run(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=source)
        return pytester.runpytest_inprocess(*ours, *arguments)

    return run


def test_a_rank_can_skip_expect_a_failure_and_fail(run: Run) -> None:
    result = run(
        """
        import pytest

        def skip():
            pytest.skip("no such model")

        def importorskip():
            pytest.importorskip("trlcompat_is_not_there")

        def xfail():
            pytest.xfail("known to be wrong")

        def fail():
            pytest.fail("the losses differ")

        @pytest.mark.parametrize("body", [skip, importorskip, xfail, fail])
        def test_it(launcher, body):
            launcher(body, strategy="single")

        def test_unchecked(launcher):
            result = launcher(skip, strategy="single", check=False)
            assert (result.ranks[0].failure.type_name, result.ranks[0].failure.outcome) == ("Skipped", "skip")

        def test_raised(launcher):
            with pytest.raises(pytest.fail.Exception, match="^the losses differ"):
                launcher(fail, strategy="single")
        """,
        "-rsxf",
    )
    result.assert_outcomes(passed=2, skipped=2, xfailed=1, failed=1)
    text = result.stdout.str()
    assert re.search(r"SKIPPED \[1\] test_it\.py:15: no such model", text)
    assert re.search(r"SKIPPED \[1\] test_it\.py:15: could not import 'trlcompat_is_not_there'", text)
    assert re.search(r"XFAIL test_it\.py::test_it\[xfail\] - known to be wrong", text)
    assert re.search(r"FAILED test_it\.py::test_it\[fail\] - Failed: the losses differ", text)
    assert "rank 0 raised Failed after" in text


def test_the_exception_of_a_rank_can_be_raised_itself(run: Run) -> None:
    result = run(
        """
        import pytest
        from pytest_trlcompat.launch import LaunchError

        class MyError(Exception):
            def __init__(self, text, code=0):
                super().__init__(text)
                self.code = code

        class TwoArguments(Exception):
            def __init__(self, one, two):
                super().__init__(f"{one} and {two}")

        class Holding(Exception):
            def __init__(self):
                import threading
                self.lock = threading.Lock()

        def raise_mine():
            raise MyError("mine", code=3)

        def raise_two():
            raise TwoArguments(1, 2)

        def raise_holding():
            raise Holding

        def test_mine(launcher):
            with pytest.raises(MyError, match="^mine$") as caught:
                launcher(raise_mine, strategy="single", raises="original")
            assert caught.value.code == 3
            assert isinstance(caught.value.__cause__, LaunchError)
            assert caught.value.__cause__.result.ranks[0].failure.type_name == "MyError"

        def test_as_ever(launcher):
            with pytest.raises(LaunchError, match="rank 0 raised MyError"):
                launcher(raise_mine, strategy="single")

        @pytest.mark.parametrize(("body", "why"), [
            (raise_two, "the TwoArguments of rank 0, but it cannot be unpickled: TypeError"),
            (raise_holding, "the Holding of rank 0, but it cannot be pickled"),
        ])
        def test_not_possible(launcher, body, why):
            with pytest.raises(LaunchError, match=why):
                launcher(body, strategy="single", raises="original")

        def test_a_death_has_no_exception(launcher):
            with pytest.raises(LaunchError, match="exited with status 7"):
                launcher(exit_hard, strategy="single", raises="original")

        def exit_hard():
            import os
            os._exit(7)

        def test_a_mistake(launcher):
            with pytest.raises(ValueError, match="unknown raises 'mine'; known are launch, original"):
                launcher(raise_mine, strategy="single", raises="mine")
        """
    )
    result.assert_outcomes(passed=6)


def test_warnings_of_ranks_are_the_tests(run: Run) -> None:
    result = run(
        """
        import warnings
        import pytest

        class MyWarning(UserWarning):
            pass

        def warn(category):
            warnings.warn("do not do this", category)
            warnings.warn("do not do this either", category, stacklevel=2)

        @pytest.mark.parametrize("category", [UserWarning, DeprecationWarning, MyWarning])
        def test_warns(launcher, category):
            with pytest.warns(category) as warned:
                launcher(warn, category, strategy="single")
            assert [str(each.message) for each in warned] == ["do not do this", "do not do this either"]
            assert [each.filename.rpartition("/")[2] for each in warned] == ["test_it.py", "rank.py"]
            assert {each.category for each in warned} == {category}

        def test_none(launcher):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert launcher(warn, UserWarning, strategy="single").ranks[0].stderr == ""

        @pytest.mark.filterwarnings("error:do not do this$")
        def test_an_error(launcher):
            with pytest.raises(UserWarning, match="do not do this$"):
                launcher(warn, UserWarning, strategy="single")

        def test_listed(launcher):
            for _ in range(3):
                launcher(warn, MyWarning, strategy="single")

        def raise_after_warning():
            warnings.warn("do not do this")
            raise LookupError("more important")

        @pytest.mark.filterwarnings("error:do not do this$")
        def test_a_failure_counts_more(launcher):
            with pytest.raises(LookupError):
                launcher(raise_after_warning, strategy="single", raises="original")
        """
    )
    result.assert_outcomes(passed=7, warnings=3)  # one is pytest's own, of a plugin that is imported already
    assert "test_it.py::test_listed" in result.stdout.str()
    assert "MyWarning: do not do this" in result.stdout.str()


def test_log_records_of_ranks_are_the_tests(run: Run) -> None:
    result = run(
        """
        import logging

        def log():
            quiet, loud = logging.getLogger("quiet"), logging.getLogger("my.loud")
            quiet.info("not shown")
            quiet.warning("lost %d of %s", 3, ["a"])
            loud.debug("details", extra={"step": 7, "what": object()})
            try:
                1 / 0
            except ZeroDivisionError:
                quiet.exception("it failed")
            aloof = logging.getLogger("aloof")
            aloof.propagate = False
            aloof.warning("for itself")
            logging.basicConfig(level=logging.ERROR)
            return len(logging.getLogger().handlers)

        def test_it(launcher, caplog):
            caplog.set_level(logging.DEBUG, "my")
            result = launcher(log, strategy="single")
            assert result.values == [1]
            assert caplog.record_tuples == [
                ("quiet", logging.WARNING, "lost 3 of ['a']"),
                ("my.loud", logging.DEBUG, "details"),
                ("quiet", logging.ERROR, "it failed"),
            ]
            assert [(each.rank, each.funcName) for each in caplog.records] == [(0, "log")] * 3
            assert caplog.records[1].step == 7
            assert "ZeroDivisionError: division by zero" in caplog.text
            assert "lost 3 of ['a']" in result.ranks[0].stderr

        def test_the_level_is_back(launcher, caplog):
            launcher(log, strategy="single")
            assert "details" not in caplog.text
        """
    )
    result.assert_outcomes(passed=2)


def test_suites_measure_whatever_the_project_has_set(run: Run) -> None:
    result = run(
        """
        import logging, warnings
        import pytest

        def talk():
            logging.getLogger("my").info("not asked for")
            warnings.warn("old", DeprecationWarning)
            warnings.warn("the stack says so")
            print("printed")

        @pytest.mark.known_issue("grpo-logits-to-keep")
        def test_suite(launcher, caplog, capsys):
            caplog.set_level(logging.INFO)
            (rank,) = launcher(talk, strategy="single").ranks
            assert (rank.warned, rank.records, caplog.records, capsys.readouterr().out) == ((), (), [], "")
            assert "the stack says so" in rank.stderr
            assert "old" not in rank.stderr

        def test_other(launcher):
            launcher(talk, strategy="single")
        """,
        *("-W", "error:the stack says so"),
    )
    result.assert_outcomes(passed=1, failed=1)
    assert "FAILED test_it.py::test_other - UserWarning: the stack says so" in result.stdout.str()


PRINTING = """
    import sys

    def talk(text="said"):
        print(text)
        print("0 %\\r50 %\\r100 %", file=sys.stderr)

    def test_passes(launcher):
        launcher(talk, strategy="single")

    def test_fails_by_its_own_assert(launcher):
        launcher(talk, "said before", strategy="single")
        assert 1 == 2

    def test_sees_it(launcher, capsys):
        launcher(talk, strategy="single")
        assert capsys.readouterr() == ("[rank 0] said\\n", "[rank 0] 100 %\\n")

    def test_sees_it_by_descriptor(launcher, capfd):
        launcher(talk, strategy="single")
        assert capfd.readouterr() == ("[rank 0] said\\n", "[rank 0] 100 %\\n")
"""


def test_what_ranks_print_is_shown_with_a_failure(run: Run) -> None:
    result = run(PRINTING)
    result.assert_outcomes(passed=3, failed=1)
    text = result.stdout.str()
    assert re.search(
        r"Captured stdout call -+\n\[rank 0\] said before\n-+ Captured stderr call -+\n\[rank 0\] 100 %\n", text
    )
    assert "[rank 0] said\n" not in text


def test_with_s_ranks_print_at_once(run: Run, pytester: pytest.Pytester) -> None:
    result = run(PRINTING, "-s")
    result.assert_outcomes(passed=3, failed=1)
    assert result.stdout.str().count("[rank 0] said\n") == 1
    assert result.errlines == ["[rank 0] 100 %"] * 2
    flag = pytester.path / "seen"
    pytester.makepyfile(
        test_live=f"""
        import pathlib, sys, time

        def talk():
            print("first", flush=True)
            sys.stdout.write("half ")
            while not pathlib.Path({str(flag)!r}).exists():
                time.sleep(0.01)
            print("a line")

        class Watch:
            def __init__(self, stream):
                self.stream = stream
            def write(self, text):
                if text == "[rank 0] first\\n":  # printed while the rank runs: it ends only after this
                    pathlib.Path({str(flag)!r}).touch()
                return self.stream.write(text)
            def __getattr__(self, name):
                return getattr(self.stream, name)

        def test_live(launcher, monkeypatch):
            monkeypatch.setattr(sys, "stdout", Watch(sys.stdout))
            launcher(talk, strategy="single", timeout=20)
        """
    )
    live = pytester.runpytest_inprocess("-p", PLUGIN, "--trlcompat-device=cpu", "-s", "test_live.py")
    live.assert_outcomes(passed=1)
    assert [line for line in live.outlines if "rank 0" in line][-1] == "[rank 0] half a line"
