"""What to paste upstream: which issues have a script, and that report, script and catalogue agree."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from packaging.version import Version

from pytest_trlcompat import stack
from pytest_trlcompat.catalog import evidence, known_issues, remedies, upstream_reports
from pytest_trlcompat.catalog.upstream_reports import commands, folder, main, output_of, reported, stored_report

SCRIPTS = sorted(folder().glob("*.py"))
IDS = [script.stem for script in SCRIPTS]
LINES = 40
HOST_IS_DEVICE = {"distillation-fsdp-teacher", "grpo-fsdp2-offload-generation", "grpo-zero3-no-gather"}
"""Scripts run in plain processes on the CPU, where host and device are the same, and these do not show."""
NEEDS_ENGINE = {
    *("grpo-vllm-dora", "grpo-vllm-image-token", "grpo-vllm-images", "grpo-vllm-merge-drift"),
    *("grpo-vllm-server-loss", "grpo-vllm-sync-memory", "grpo-vllm-tied-embeddings"),
    *("grpo-vllm-trained-tokens", "grpo-vllm-weights"),
}
"""Of vLLM itself, which the cell of the scripts lacks."""
AS_GRPO = {
    f"{trainer}-vllm-{what}"
    for trainer in ("distillation", "rloo")
    for what in ("batches", "image-token", "images", "merge-drift", "server-weights", "weights")
} - {"rloo-vllm-batches", "distillation-vllm-image-token", "distillation-vllm-images"}
"""What the same code of TRL does with other trainers, of which GRPO's reports tell."""
MENDED_IN_PART = {
    *("grpo-vllm-server-weights", "grpo-vllm-sync-memory", "grpo-vllm-weights"),
    *("rloo-vllm-server-weights", "rloo-vllm-weights"),
}
"""What releases before 1.0 have mended under some strategies, and the newest shows under others."""
VLLM = "0.31.0"
"""Beside the newest cell, for what bites with vLLM alone."""


def live() -> set[str]:
    """Issues that nobody has cured, and that the newest cell shows."""
    newest = max(
        evidence.published().cells, key=lambda cell: [Version(cell.versions[p]) for p in ("trl", "transformers")]
    )
    return {
        issue.id
        for issue in known_issues.load().values()
        for label in issue.labels()
        for prediction in [issue.predict("upstream", label, {**newest.versions, "vllm": VLLM})]
        if (not remedies.cured_in(issue) or issue.id in MENDED_IN_PART)
        and prediction is not None
        and prediction.verdict.is_problem
    }


def test_each_script_is_of_an_issue_that_nobody_has_cured_and_the_newest_cell_shows() -> None:
    assert set(IDS) - live() == set()


def test_each_live_issue_with_a_suite_of_its_own_has_a_script_or_cannot_have_one() -> None:
    """Those of the conformance suites have a row that shows them, and may have a script as well."""
    catalog = known_issues.load()
    measured_alone = {issue for issue in live() if not catalog[issue].suite.startswith("conformance/")}
    assert len(measured_alone) >= 30
    assert measured_alone - set(IDS) == HOST_IS_DEVICE | NEEDS_ENGINE | AS_GRPO


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_a_script_is_short_and_without_this_package(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= LINES
    assert "trlcompat" not in text
    tree = ast.parse(text)
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in modules if any(part.startswith("_") for part in name.split("."))]
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    private = {name for name in names if name.startswith("_") and not name.endswith("__")}
    assert private <= {"_exit"}  # of os, and public
    assert all(command.split()[-1] == script.name for command in commands(script))


def test_every_script_was_run_and_no_other() -> None:
    measured = json.loads((folder() / "measured.json").read_text(encoding="utf-8"))
    assert list(measured) == IDS == reported()
    for script in SCRIPTS:
        entry = measured[script.stem]
        assert list(entry["outputs"]) == commands(script), (
            f"run it again: python -m pytest_trlcompat.catalog.upstream_reports {script.stem}"
        )
        assert all("wrong" in line and "right" in line for line in entry["outputs"].values())


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_a_report_has_the_issue_the_script_what_it_printed_and_the_versions(script: Path) -> None:
    issue = known_issues.load()[script.stem]
    measured = json.loads((folder() / "measured.json").read_text(encoding="utf-8"))[issue.id]
    lines = stored_report(issue).splitlines()
    assert lines[0] == f"# {issue.title}"
    assert lines[lines.index("## Versions") + 1] == measured["versions"]
    code = lines[lines.index("```python") + 1 : lines.index("```")]
    assert code == script.read_text(encoding="utf-8").splitlines()
    for command, line in measured["outputs"].items():
        assert lines[lines.index(f"$ {command}") + 1] == line
    causes = [line.removeprefix("Cause: ").removesuffix(".") for line in lines if line.startswith("Cause: ")]
    assert causes
    assert set(causes) <= {prediction.why for prediction in issue.predictions if prediction.subject == "upstream"}
    assert [line.removeprefix("- ") for line in lines if line.startswith("- https://")] == list(issue.upstream)


def test_what_a_script_prints_is_kept_beside_that_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_reports, "folder", lambda: tmp_path)
    (tmp_path / "measured.json").write_text('{"sft-logits": {"outputs": {}, "versions": "trl 1.0.0"}}')
    script = tmp_path / "grpo-positions.py"
    script.write_text('"""X.\n\n    python grpo-positions.py\n"""\nprint("wrong 1, right 2")\n')
    assert main(["grpo-positions"]) == 0
    assert json.loads((tmp_path / "measured.json").read_text()) == {
        "grpo-positions": {
            "outputs": {"python grpo-positions.py": "wrong 1, right 2"},
            "versions": stack.describe(stack.installed()),
        },
        "sft-logits": {"outputs": {}, "versions": "trl 1.0.0"},
    }


def test_a_script_that_fails_or_prints_nothing_is_reported_with_its_output(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text('"""X.\n\n    EXAMPLE=1 python x.py\n"""\nimport os\nprint("seen", os.environ["EXAMPLE"])\n')
    (command,) = commands(script)
    with pytest.raises(RuntimeError, match=r"EXAMPLE=1 python x.py: exit status 0\nseen 1"):
        output_of(command, script)
    script.write_text(script.read_text() + 'print("wrong 1, right 2")\n')
    assert output_of(command, script) == "wrong 1, right 2"
    script.write_text(script.read_text() + "raise SystemExit('no such model')\n")
    with pytest.raises(RuntimeError, match=r"exit status 1\n[^$]*no such model"):
        output_of(command, script)
