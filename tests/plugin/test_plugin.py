"""The plugin as a user meets it: pytest runs in a folder of its own, with a stack that is not really there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import __version__, accelerator, launch, stack
from pytest_trlcompat.launch import Cluster
from pytest_trlcompat.plugin import header as doctor_header
from pytest_trlcompat.plugin import settings

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "pytest_trlcompat.plugin"
STACK = {"torch": "2.13.0+cpu", "transformers": "4.48.3", "trl": "0.15.2", "accelerate": "1.4.0"}
BITES = f"trlcompat: {doctor_header.line(STACK)}"
"""What it says is tested in test_header.py."""
FIXTURES = (
    "tiny_qwen2",
    "tiny_mistral",
    "prompts",
    "launcher",
    "ddp_launcher",
    "deepspeed_launcher",
    "fsdp_launcher",
    "version_matrix",
    "judge",
)

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def installed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a stack as far as metadata goes, and modules that tell when they are imported."""
    site = pytester.mkdir("site")
    for package in stack.PACKAGES:
        (site / f"{package}.py").write_text("")
        if package in STACK:
            folder = site / f"{package}-{STACK[package]}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {STACK[package]}\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return site


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, installed: Path) -> Run:
    """pytest with this plugin and no other, in this process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in [name for name in os.environ if name.startswith("TRLCOMPAT_")]:
        monkeypatch.delenv(name)
    # The result on a machine with a GPU is tested in test_settings.py.
    monkeypatch.setattr(settings, "cuda_obstacle", lambda: "there is no NVIDIA device")

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", PLUGIN, *arguments)

    return run


def header(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if line.startswith("trlcompat:")]


def test_the_header_names_the_stack_and_the_device(run: Run) -> None:
    assert header(run()) == [
        f"trlcompat: {__version__}, torch 2.13.0+cpu, transformers 4.48.3, trl 0.15.2, accelerate 1.4.0",
        "trlcompat: device software (there is no NVIDIA device)",
        BITES,
    ]


def test_the_header_has_no_line_about_issues_if_none_applies(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_header, "line", lambda installed: None)
    assert len(header(run())) == 2


def test_without_pytests_cache_the_header_is_the_same(run: Run, pytester: pytest.Pytester) -> None:
    assert header(run("-p", "no:cacheprovider"))[-1] == BITES
    assert not (pytester.path / ".pytest_cache").exists()
    assert [header(run())[-1] for _ in range(2)] == [BITES, BITES]
    assert (pytester.path / ".pytest_cache" / "v" / "trlcompat" / "header").is_file()


def test_the_header_says_where_each_setting_came_from(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeini("[pytest]\ntrlcompat_issue =\n    grpo-logits-to-keep\n    grpo-fsdp-ref-model\n")
    monkeypatch.setenv("TRLCOMPAT_TIMEOUT", "90")
    assert header(run("--trlcompat-device=cpu", "--trlcompat-resume"))[1:] == [
        "trlcompat: device cpu (option --trlcompat-device)",
        "trlcompat: settings device cpu (option --trlcompat-device), resume True (option --trlcompat-resume), "
        "issue grpo-logits-to-keep grpo-fsdp-ref-model (ini trlcompat_issue), "
        "timeout 90 (environment TRLCOMPAT_TIMEOUT)",
        BITES,
    ]


@pytest.mark.parametrize(
    "ini, variable",
    [("trlcompat_device = tpu", ""), ("", "soon"), ("trlcompat_resume = maybe", "")],
)
def test_a_broken_configuration_ends_with_one_line_and_help_works_all_the_same(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ini: str, variable: str
) -> None:
    pytester.makeini(f"[pytest]\n{ini}\n")
    monkeypatch.setenv("TRLCOMPAT_TIMEOUT", variable)
    result = run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert re.match(r"ERROR: trlcompat: (ini|environment) (TRLCOMPAT|trlcompat)_\w+: ", line)
    helped = run("--help")
    assert helped.ret == pytest.ExitCode.OK
    helped.stdout.fnmatch_lines(["*--trlcompat-device={auto,software,cuda,cpu}*", "*trlcompat_timeout (string):*"])


def test_cuda_on_a_machine_without_it_is_a_usage_error(run: Run) -> None:
    result = run("--trlcompat-device=cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: trlcompat: option --trlcompat-device requests 'cuda', but there is no NVIDIA*"]
    )


def test_options_have_their_own_group(run: Run) -> None:
    lines = run("--help").outlines
    start = next(number for number, line in enumerate(lines) if line.startswith("trlcompat:"))
    group = lines[start : lines.index("", start)]
    shown = [match[1] for line in group if (match := re.match(r"  --trlcompat-([\w-]+)", line))]
    assert shown == [
        *("device", "results", "resume", "issue", "subject", "timeout"),
        *("nnodes", "node-rank", "rdzv-endpoint"),
    ]


def test_every_fixture_is_documented(run: Run) -> None:
    lines = run("--fixtures").outlines
    for name in FIXTURES:
        (number,) = [number for number, line in enumerate(lines) if re.match(rf"{name}( \[| --)", line)]
        assert lines[number + 1].startswith("    "), name
        assert "no docstring" not in lines[number + 1], name


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


def test_version_matrix_knows_the_installed_versions_and_the_cells(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_trlcompat.stack import RangeError

        def test_it(version_matrix):
            assert version_matrix.installed["trl"] == "0.15.2"
            assert "peft" not in version_matrix.installed
            assert version_matrix.holds(trl=">=0.15", transformers="<4.50", torch="==2.13.0")
            assert not version_matrix.holds(trl=">=0.15", transformers=">=4.50")
            assert not version_matrix.holds(peft=">=0")
            with pytest.raises(RangeError, match="unknown package 'tlr'"):
                version_matrix.holds(tlr=">=0")
            assert "trl1.16.0-tf5.23.0" in [cell.id for cell in version_matrix.cells]
            assert version_matrix.cell.id == "trl0.15.2-tf4.48.3"
        """
    )
    run().assert_outcomes(passed=1)


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


class RecordingLauncher:
    """Stands in for the real launcher: records its calls."""

    made: list[RecordingLauncher]

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.closed = 0
        self.made.append(self)

    def __enter__(self) -> RecordingLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "launched"


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[RecordingLauncher]:
    """The launchers that an inner run makes."""
    monkeypatch.setattr(RecordingLauncher, "made", [], raising=False)
    monkeypatch.setattr(launch, "Launcher", RecordingLauncher)
    return RecordingLauncher.made


def test_launcher_fixtures_share_one_launcher_and_choose_the_strategy(
    run: Run, pytester: pytest.Pytester, launchers: list[RecordingLauncher]
) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_ddp(ddp_launcher):
            assert ddp_launcher(print, 1, world_size=4, timeout=5, x=2) == "launched"

        def test_deepspeed(deepspeed_launcher):
            for stage in (1, 2, 3):
                deepspeed_launcher(print, stage=stage)
            deepspeed_launcher(print)
            with pytest.raises(ValueError, match="^stage=0; choose one of 1, 2, 3$"):
                deepspeed_launcher(print, stage=0)

        def test_fsdp(fsdp_launcher):
            fsdp_launcher(print, version=2, options={"sharding_strategy": "NO_SHARD"})
            fsdp_launcher(print)
            with pytest.raises(ValueError, match="^version=3; choose one of 1, 2$"):
                fsdp_launcher(print, version=3)

        def test_any(launcher):
            launcher(print, strategy="single")
        """
    )
    run("--trlcompat-device=cpu", "--trlcompat-timeout=7").assert_outcomes(passed=4)
    (launcher,) = launchers
    assert launcher.arguments == {"device": "cpu", "timeout": 7.0, "cluster": Cluster()}
    assert launcher.calls[0] == ((1,), {"strategy": "ddp", "world_size": 4, "timeout": 5, "x": 2})
    assert [kwargs["strategy"] for _, kwargs in launcher.calls] == [
        *("ddp", "zero1", "zero2", "zero3", "zero3", "fsdp2", "fsdp1", "single"),
    ]
    assert launcher.calls[5][1]["options"] == {"sharding_strategy": "NO_SHARD"}
    assert launcher.closed == 1


@pytest.mark.parametrize("ending", ["KeyboardInterrupt", "SystemExit", "AssertionError"])
def test_the_launcher_is_closed_however_the_session_ends(
    run: Run, pytester: pytest.Pytester, launchers: list[RecordingLauncher], ending: str
) -> None:
    pytester.makepyfile(f"def test_it(launcher): raise {ending}")
    if ending == "KeyboardInterrupt":
        with pytest.raises(KeyboardInterrupt):  # pytester passes it on
            run("--trlcompat-device=cpu")
    else:
        run("--trlcompat-device=cpu")
    assert [launcher.closed for launcher in launchers] == [1]


def test_sessions_without_a_launch_make_no_launcher(
    run: Run, pytester: pytest.Pytester, launchers: list[RecordingLauncher]
) -> None:
    pytester.makepyfile("def test_it(version_matrix): pass")
    run().assert_outcomes(passed=1)
    assert launchers == []


HEAVY = {*stack.PACKAGES, "cloudpickle", "jinja2", "nox", "rich"}
PACKAGES_OF_FEW_TESTS = ("accelerator", "checks", "launch", "matrix", "plugin.judging", "tiny", "trainers")


def test_the_plugin_imports_neither_the_stack_nor_packages_that_few_tests_need(
    pytester: pytest.Pytester, installed: Path
) -> None:
    pytester.makepyfile(
        """
        import sys
        import pytest

        @pytest.mark.versions(trl=">=0.15")
        def test_it(pytestconfig):
            print("modules:", *sys.modules)
        """
    )
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pytest", "-s", "-p", PLUGIN],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in result.stdout
    assert "torch 2.13.0+cpu" in result.stdout
    # importtime shows what was imported and dropped again, sys.modules what went past the import statement.
    timed = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
    (listed,) = (line for line in result.stdout.splitlines() if "modules:" in line)
    imported = timed | set(listed.split())
    assert "pytest_trlcompat.plugin.settings" in timed
    assert PLUGIN in imported
    assert not imported & HEAVY
    assert not imported & {f"pytest_trlcompat.{package}" for package in PACKAGES_OF_FEW_TESTS}


LAUNCHING = """
    def test_one(launcher): pass
    def test_two(ddp_launcher): pass
"""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a machine without one; what the build itself says is tests/accelerator/test_build.py's matter."""

    def build() -> None:
        raise accelerator.AcceleratorError("no C++ compiler was found")

    monkeypatch.setattr(accelerator, "build", build)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_launching_tests_fail_with_the_reason_alone(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(LAUNCHING)
    result = run()
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["trlcompat: no C++ compiler was found"])
    result.stdout.no_fnmatch_line("*During handling*")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_a_run_for_results_ends_at_once(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(LAUNCHING)
    result = run("--trlcompat-results", "out.jsonl")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["*Exit: trlcompat: no C++ compiler was found*"])
    assert not (pytester.path / "out.jsonl").exists()
