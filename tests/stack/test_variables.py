"""What a stack test leaves in ``os.environ``: nothing of its own, and all that fixtures of the session mean to set."""

from __future__ import annotations

import pytest

SESSION = """
    import os

    import pytest


    @pytest.fixture(scope="session")
    def of_session():
        os.environ["OF_SESSION"] = "1"
        yield
        assert os.environ.pop("OF_SESSION") == "1"


    @pytest.fixture(scope="module")
    def of_module(of_session):
        os.environ["OF_MODULE"] = "1"
        yield
        assert os.environ.pop("OF_MODULE") == "1"


    @pytest.fixture(scope="session")
    def serve():
        def start():
            os.environ["TRLCOMPAT_VLLM_CONTROL"] = "/folder"

        yield start
        assert os.environ.pop("TRLCOMPAT_VLLM_CONTROL") == "/folder"


    def test_sets_changes_and_removes(of_module, serve):
        assert os.environ["CHANGED"] == os.environ["REMOVED"] == "before"
        os.environ.update(ACCELERATE_USE_IPEX="false", CHANGED="after", OF_MODULE="2")
        del os.environ["REMOVED"]
        serve()


    def test_sees_what_was_there_before_it():
        assert "ACCELERATE_USE_IPEX" not in os.environ
        assert os.environ["CHANGED"] == os.environ["REMOVED"] == "before"


    def test_sees_what_wider_fixtures_have_set(of_session, of_module):
        assert (os.environ["OF_SESSION"], os.environ["OF_MODULE"]) == ("1", "1")
        assert os.environ["TRLCOMPAT_VLLM_CONTROL"] == "/folder"


    def test_with_the_variables_of_monkeypatch(monkeypatch):
        monkeypatch.setenv("CHANGED", "by monkeypatch")
        monkeypatch.delenv("REMOVED")
        monkeypatch.setenv("ADDED", "by monkeypatch")


    def test_after_monkeypatch():
        assert os.environ["CHANGED"] == os.environ["REMOVED"] == "before"
        assert "ADDED" not in os.environ
"""


def test_each_test_begins_with_the_variables_of_the_session(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_IPEX", raising=False)  # an earlier test module may have set it on purpose
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    pytester.makeconftest("from tests.stack.conftest import variables_are_restored")
    pytester.makepyfile(SESSION)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=5)
