"""The plugin as a user meets it: pytest runs in a folder of its own, with a stack that is not really there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat import __version__, stack
from pytest_trlcompat.plugin import header as doctor_header

from .running import PLUGIN, STACK, Run

BITES = f"trlcompat: {doctor_header.line(STACK)}"
"""What it says is tested in test_header.py."""
FIXTURES = (
    "tiny_qwen2",
    "tiny_mistral",
    "tiny_llama",
    "tiny_gemma",
    "tiny_moe",
    "tiny_vlm",
    "prompts",
    "conversations",
    "preferences",
    "unpaired_preferences",
    "launcher",
    "ddp_launcher",
    "deepspeed_launcher",
    "fsdp_launcher",
    "strategy_launcher",
    "assert_equivalent",
    "version_matrix",
    "judge",
)


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
        *("device", "results", "resume", "issue", "subject", "trainer", "timeout"),
        *("preload", "debug-rank", "nnodes", "node-rank", "rdzv-endpoint"),
    ]


def test_every_fixture_is_documented(run: Run) -> None:
    lines = run("--fixtures").outlines
    for name in FIXTURES:
        (number,) = [number for number, line in enumerate(lines) if re.match(rf"{name}( \[| --)", line)]
        assert lines[number + 1].startswith("    "), name
        assert "no docstring" not in lines[number + 1], name


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
