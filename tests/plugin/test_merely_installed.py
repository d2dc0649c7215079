"""Projects that have the plugin installed and do not use it: nothing of theirs is skipped, refused or held up."""

from __future__ import annotations

import os

import pytest

from .running import Run

MARKERS = """
    [pytest]
    markers =
        gpu: the project's own; it looks for a GPU itself
        versions: the project's own, with other arguments
        strategies: the project's own
        known_issue: the project's own
"""


@pytest.fixture
def installed_only(installed: object, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest with the plugin found by its entry point, as after ``pip install``, in a process of its own."""
    site = pytester.path / "entry"
    folder = site / "pytest_trlcompat-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-trlcompat\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[pytest11]\ntrlcompat = pytest_trlcompat.plugin\n")
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))

    def run(*arguments: str) -> pytest.RunResult:
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
        result.stdout.fnmatch_lines(["trlcompat: *, *trl 0.15.2*"])  # it is there
        return result

    return run


def test_a_projects_own_gpu_tests_run_where_there_is_no_nvidia_device(
    installed_only: Run, pytester: pytest.Pytester
) -> None:
    pytester.makeini(MARKERS)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        def test_on_rocm():
            pass

        @pytest.mark.gpu(memory="8GiB")
        class TestOnXPU:
            def test_fails(self):
                assert False
        """
    )
    installed_only("--strict-markers").assert_outcomes(passed=1, failed=1)


def test_markers_of_the_same_names_mean_what_the_project_means(installed_only: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini(MARKERS)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.versions("v1", "v2")
        @pytest.mark.strategies("greedy")
        @pytest.mark.known_issue("JIRA-12")
        def test_ours(request):
            assert request.node.get_closest_marker("versions").args == ("v1", "v2")

        @pytest.mark.versions(trl=">=99")
        def test_with_what_would_skip_it():
            pass
        """
    )
    installed_only("--strict-markers").assert_outcomes(passed=2)


def test_a_project_with_fixtures_and_options_of_its_own_keeps_them(
    installed_only: Run, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(
        """
        import pytest

        def pytest_addoption(parser):
            parser.addoption("--device")

        @pytest.fixture
        def prompts():
            return ["mine"]
        """
    )
    pytester.makeini(MARKERS)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        @pytest.mark.versions("v1")
        def test_mine(prompts, pytestconfig):
            assert prompts == ["mine"]
        """
    )
    installed_only("--device", "cpu").assert_outcomes(passed=1)


def test_a_project_has_fixtures_of_the_same_names(installed_only: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini(MARKERS)
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture
        def strategy_launcher():
            return "mine"

        @pytest.fixture
        def judge():
            return "mine"

        @pytest.fixture
        def launcher():
            return "mine"
        """
    )
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        @pytest.mark.strategies("greedy")
        @pytest.mark.known_issue("JIRA-12")
        def test_mine(strategy_launcher, judge, launcher):
            assert {strategy_launcher, judge, launcher} == {"mine"}

        def test_without_a_marker(strategy_launcher):
            assert strategy_launcher == "mine"
        """
    )
    installed_only("--strict-markers").assert_outcomes(passed=2)


def test_a_fixture_that_builds_on_the_plugins_own_gets_its_strategies(
    installed_only: Run, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture
        def strategy_launcher(strategy_launcher):
            return strategy_launcher.strategy
        """
    )
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.strategies("single", "ddp")
        def test_both(strategy_launcher):
            assert strategy_launcher in ("single", "ddp")
        """
    )
    result = installed_only("--collect-only")
    result.stdout.fnmatch_lines(["*test_both[[]single[]]*", "*test_both[[]ddp[]]*"])


def test_no_line_is_made_that_takes_time(installed_only: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = installed_only()
    result.assert_outcomes(passed=1)
    assert "affect this stack" not in result.stdout.str()


def test_one_that_uses_a_fixture_hears_of_known_issues_and_is_skipped_by_markers(
    installed_only: Run, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.versions(trl=">=99")
        def test_skipped(version_matrix):
            assert False

        @pytest.mark.gpu
        def test_needs_a_gpu(version_matrix):
            assert False

        @pytest.mark.trlcompat_versions(trl=">=99")
        @pytest.mark.trlcompat_gpu
        def test_skipped_without_a_fixture():
            assert False
        """
    )
    result = installed_only("-rs", "--strict-markers", "--trlcompat-device", "software")
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(["trlcompat: *known issues affect this stack*"])


def test_an_invalid_marker_of_a_test_that_uses_a_fixture_is_refused(
    installed_only: Run, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.versions("v1")
        def test_invalid(version_matrix):
            pass
        """
    )
    result = installed_only()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*marker versions: takes ranges by package*"])


@pytest.mark.parametrize("named", ["-p", "variable", "conftest"])
def test_a_project_that_names_the_plugin_means_its_markers(
    installed_only: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.versions(trl=">=99")
        def test_skipped():
            assert False
        """
    )
    if named == "conftest":
        pytester.makeconftest('pytest_plugins = ["trlcompat"]')
    if named == "variable":
        monkeypatch.setenv("PYTEST_PLUGINS", "trlcompat")
    result = installed_only(*(["-p", "trlcompat"] if named == "-p" else []))
    result.assert_outcomes(skipped=1)


@pytest.mark.parametrize(("arguments", "watched"), [((), False), (("-p", "trlcompat"), True)])
def test_a_projects_own_trainings_are_left_as_they_are(
    installed_only: Run, pytester: pytest.Pytester, arguments: tuple[str, ...], watched: bool
) -> None:
    pytester.makeconftest(
        """
        import sys
        import types

        class CallbackHandler:
            def on_train_begin(self):
                pass

        sys.modules["transformers.trainer"] = types.ModuleType("transformers.trainer")
        sys.modules["transformers.trainer_callback"] = module = types.ModuleType("transformers.trainer_callback")
        module.CallbackHandler = CallbackHandler
        """
    )
    pytester.makepyfile(
        f"""
        import sys

        def test_training():
            handler = sys.modules["transformers.trainer_callback"].CallbackHandler
            assert hasattr(handler.on_train_begin, "__wrapped__") is {watched}
        """
    )
    installed_only(*arguments).assert_outcomes(passed=1)
