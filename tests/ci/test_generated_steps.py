"""The files that ``init-ci`` writes, with each of their shell steps run in a project.

A project of a real package of the stack, the wheel of this checkout, a real uv, pip and pytest. Left out are the steps
that are services of GitHub (see ``steps.LEFT_OUT``); of GitLab's file the image, caches and the upload of artifacts.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_trlcompat.ci.command import main
from pytest_trlcompat.matrix.uv import find_uv

from .conftest import HERE, STACK, TRL, WITHOUT
from .steps import Runner, StepFailed, read

PASSES = """
def test_the_plugin_is_there(request, tmp_path):
    assert request.config.pluginmanager.has_plugin("trlcompat")
    import transformers  # the version that the project names
    assert transformers.__version__ == "4.50.3"
"""
FAILS = "def test_it():\n    assert 1 + 1 == 3\n"
CONTEXT = {"matrix.python": HERE, "strategy.job-index": "0"}
GITHUB = Path(".github", "workflows", "trlcompat.yml")


def project(machine: Runner, files: dict[str, str]) -> None:
    for name, text in {".python-version": f"{HERE}\n", "tests/test_own.py": PASSES, **files}.items():
        path = machine.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write(machine: Runner, kind: str, origin: str) -> str:
    assert main([kind, "--from", origin, "--project", str(machine.folder)]) == 0
    return (machine.folder / (GITHUB if kind == "github" else ".gitlab-ci.yml")).read_text()


def installed(machine: Runner) -> str:
    python = machine.folder / ".venv" / "bin" / "python"
    return subprocess.run(
        [find_uv(), "pip", "freeze", "--python", str(python)], capture_output=True, text=True, check=True
    ).stdout


def test_github_with_requirements(machine: Runner, vendored: str) -> None:
    project(machine, {"requirements.txt": f"{STACK}\n", "requirements-test.txt": "iniconfig\n"})
    ran = machine.github(read(write(machine, "github", vendored)), "training", CONTEXT)
    assert len(ran.scripts) == 4
    assert ran.left_out == ["actions/checkout", "actions/setup-python", "actions/cache", "actions/upload-artifact"]
    assert STACK in installed(machine)
    assert "pytest-trlcompat" in installed(machine)
    doctor = (machine.folder / "doctor.txt").read_text()
    assert doctor.startswith("transformers 4.50.3 (requirements.txt)")
    assert doctor in ran.output
    assert "::warning title=trlcompat doctor::known issues affect these versions" in ran.output
    assert ran.summary.startswith(f"## Known issues\n~~~~text\n{doctor}~~~~\n## Tests\n~~~~text\n")
    assert "1 passed" in ran.summary
    assert 'tests="1"' in (machine.folder / "junit.xml").read_text()


def test_github_with_a_lock_of_uv_and_a_group_for_tests(machine: Runner, vendored: str) -> None:
    metadata = f'[project]\nname = "mine"\nversion = "1"\nrequires-python = "=={HERE}.*"\n'
    groups = f'dependencies = ["{STACK}", "{TRL}"]\n[dependency-groups]\ntest = ["iniconfig"]\n'
    project(machine, {"pyproject.toml": f"{metadata}{groups}[tool.uv]\noverride-dependencies = {list(WITHOUT)}\n"})
    environ = {**machine.variables, "PATH": "/usr/bin:/bin", "HOME": str(machine.home)}
    subprocess.run([find_uv(), "lock", "--quiet"], cwd=machine.folder, env=environ, check=True)
    ran = machine.github(read(write(machine, "github", vendored)), "training", CONTEXT)
    assert 'uv sync --frozen --python "$PYTHON" --group test' in ran.scripts[0]
    assert "trlcompat doctor uv.lock" in ran.scripts[1]
    assert (machine.folder / "doctor.txt").read_text().startswith("trl 0.17.0, transformers 4.50.3, ")
    assert "1 passed" in ran.summary


def test_github_with_a_matrix_of_stacks(machine: Runner, vendored: str) -> None:
    project(machine, {f"requirements/tf-{number}.txt": f"{STACK}\n" for number in (1, 2)})
    workflow = read(write(machine, "github", vendored))
    matrix = workflow["jobs"]["training"]["strategy"]["matrix"]
    assert matrix == {"python": [HERE], "stack": ["requirements/tf-1.txt", "requirements/tf-2.txt"]}
    context = {**CONTEXT, "matrix.stack": matrix["stack"][1]}
    ran = machine.github(workflow, "training", context)
    assert "(requirements/tf-2.txt)" in (machine.folder / "doctor.txt").read_text()
    assert "1 passed" in ran.summary


def test_github_fails_with_a_test_and_still_says_what_the_doctor_and_the_tests_said(
    machine: Runner, vendored: str
) -> None:
    project(machine, {"requirements.txt": f"{STACK}\n", "tests/test_own.py": FAILS})
    with pytest.raises(StepFailed) as failed:
        machine.github(read(write(machine, "github", vendored)), "training", CONTEXT)
    assert failed.value.status == 1
    ran = failed.value.args[-1]
    assert "## Known issues" in ran.summary
    assert "assert (1 + 1) == 3" in ran.summary
    assert "1 failed" in ran.summary


def test_github_fails_where_the_doctor_has_no_answer(machine: Runner, vendored: str) -> None:
    project(machine, {"requirements.txt": "iniconfig\n"})
    with pytest.raises(StepFailed) as failed:
        machine.github(read(write(machine, "github", vendored)), "training", CONTEXT)
    assert failed.value.status == 2
    assert "trlcompat doctor: " in failed.value.args[-1].summary


def test_gitlab_with_requirements(machine: Runner, vendored: str) -> None:
    project(machine, {"requirements.txt": f"{STACK}\n"})
    pipeline = read(write(machine, "gitlab", vendored))
    assert pipeline["trlcompat"]["parallel"]["matrix"] == [{"PYTHON": [HERE]}]
    cache = {} if "UV_OFFLINE" not in machine.variables else {"UV_OFFLINE": "1"}
    job = pipeline["trlcompat"]
    assert job["variables"].pop("UV_CACHE_DIR") == "${CI_PROJECT_DIR}/.cache/uv"  # this machine's has what is needed
    ran = machine.gitlab(pipeline, "trlcompat", {"PYTHON": HERE, **cache})
    assert (machine.folder / "doctor.txt").read_text().startswith("transformers 4.50.3 (requirements.txt)")
    assert "1 passed" in ran.output
    assert job["artifacts"]["reports"]["junit"] == "junit.xml"
    assert all((machine.folder / name).is_file() for name in ("junit.xml", *job["artifacts"]["paths"]))


def test_gitlab_fails_with_a_test(machine: Runner, vendored: str) -> None:
    project(machine, {"requirements.txt": f"{STACK}\n", "tests/test_own.py": FAILS})
    pipeline = read(write(machine, "gitlab", vendored))
    del pipeline["trlcompat"]["variables"]["UV_CACHE_DIR"]
    with pytest.raises(StepFailed, match="1 failed"):
        machine.gitlab(pipeline, "trlcompat", {"PYTHON": HERE})
