"""What runs outside nox: the hosted workflow, the hooks before a commit, and the platforms that all of it names."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import nox
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pytest_trlcompat.matrix.parsing import read_matrix

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
SWEEP = WORKFLOW.with_name("sweep.yml")
SITE = WORKFLOW.with_name("site.yml")
HOOKS = ROOT / ".pre-commit-config.yaml"
LIST_CELLS = "nox -l --json -s matrix -- --full"


@cache
def project() -> dict[str, Any]:
    return dict(nox.project.load_toml(ROOT / "pyproject.toml"))


def supported() -> tuple[str, list[str]]:
    """The operating system and the versions of Python that the project supports: pyproject's classifiers say so."""
    parts = [classifier.split(" :: ") for classifier in project()["project"]["classifiers"]]
    (system,) = (part[-1] for part in parts if part[0] == "Operating System")
    pythons = [part[-1] for part in parts if part[:2] == ["Programming Language", "Python"]]
    return system, [version for version in pythons if re.fullmatch(r"3\.\d+", version)]


def named_pythons(text: str) -> list[str]:
    """The versions of Python in a text, ``3.10 to 3.12`` spelled out."""
    ranges = re.findall(r"\b3\.(\d+) to 3\.(\d+)\b", text)
    spelled = [f"3.{minor}" for first, last in ranges for minor in range(int(first), int(last) + 1)]
    return [*spelled, *re.findall(r"\b3\.\d+\b", text)]


def test_linux_and_four_releases_of_python_are_supported() -> None:
    assert supported() == ("Linux", ["3.10", "3.11", "3.12", "3.13"])


def test_pyproject_requires_the_oldest_supported_python() -> None:
    _, pythons = supported()
    required = SpecifierSet(project()["project"]["requires-python"])
    assert [f"3.{minor}" for minor in range(14) if f"3.{minor}" in required] == pythons


def test_readme_names_the_supported_platforms() -> None:
    system, pythons = supported()
    text = " ".join((ROOT / "README.md").read_text().split())
    assert system in text
    assert set(pythons) <= set(named_pythons(text))


def other_pythons() -> tuple[str, ...]:
    """Read from the source: nox warns when a noxfile is imported a second time."""
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OTHER_PYTHONS":
            return tuple(ast.literal_eval(node.value))
    raise AssertionError("noxfile.py has no OTHER_PYTHONS")


def test_every_supported_python_is_tested() -> None:
    _, pythons = supported()
    main = read_matrix(ROOT / "fixtures" / "matrix.toml").python
    others = list(other_pythons())
    assert sorted([main, *others]) == pythons
    jobs = {
        **workflow()["jobs"],
        **yaml.safe_load(SWEEP.read_text())["jobs"],
        **yaml.safe_load(SITE.read_text())["jobs"],
    }
    assert jobs["unit"]["strategy"]["matrix"]["python"] == others
    assert yaml.safe_load((ROOT / ".gitlab-ci.yml").read_text())["default"]["image"] == f"python:{main}"
    setups = [step for job in jobs.values() for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert {step["with"]["python-version"] for step in setups} == {main}
    assert f"python{main}" in (ROOT / ".ci" / "run").read_text()


@cache
def workflow() -> dict[str, Any]:
    return dict(yaml.safe_load(WORKFLOW.read_text()))


@cache
def commands() -> list[str]:
    return [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]


def nox_list(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "nox", "--list", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_workflow_runs_what_ci_run_does_and_nightly_every_cell() -> None:
    assert ".ci/run" in commands()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert any(LIST_CELLS in command for command in commands())
    full = read_matrix(ROOT / "fixtures" / "matrix.toml").full()
    listed = nox_list("--json", "-s", "matrix", "--", "--full")
    assert listed.count('"session"') == len(full) <= 256, "a hosted matrix has at most 256 jobs"


@pytest.mark.parametrize(
    ("file", "least"),
    [(WORKFLOW, 3), (SWEEP, 2), (SITE, 1), (ROOT / ".gitlab-ci.yml", 3), (ROOT / ".ci" / "run", 6)],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_automation_names_only_sessions_that_exist(file: Path, least: int) -> None:
    text = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
    text = re.sub(r"\$\{\{.*?\}\}|\\\n", "", text)  # a value that the service fills in; a line that goes on
    sessions = (after.split(" -")[0] for after in re.findall(r"nox +(?:-l --json )?-s (.*)", text))
    names = {name for words in sessions for name in re.findall(r"(?<![^\s\"])\w+", words)}
    assert len(names) >= least
    assert names <= set(re.findall(r"^[-*] (\w+)", nox_list(), re.MULTILINE))


def test_the_site_is_published_from_main_by_a_job_that_runs_no_code_of_ours() -> None:
    site = yaml.safe_load(SITE.read_text())
    assert site[True]["push"] == {"branches": ["main"]}  # YAML 1.1 reads `on` as a truth value
    assert set(site[True]) == {"push", "workflow_dispatch"}
    assert site["permissions"] == {"contents": "read"}
    build, deploy = site["jobs"]["build"], site["jobs"]["deploy"]
    assert "permissions" not in build
    assert [step["run"] for step in build["steps"] if "run" in step][-1] == "nox -s docs"
    upload = next(step for step in build["steps"] if "upload-pages-artifact" in step.get("uses", ""))
    assert upload["with"] == {"path": "build/docs"}
    assert deploy["needs"] == "build"
    assert deploy["if"] == "github.ref == 'refs/heads/main'"
    assert deploy["permissions"] == {"pages": "write", "id-token": "write"}
    assert [step["uses"].partition("@")[0] for step in deploy["steps"]] == ["actions/deploy-pages"]
    assert not any("run" in step for step in deploy["steps"])


def test_the_site_is_published_from_the_default_branch_on_gitlab() -> None:
    pages = yaml.safe_load((ROOT / ".gitlab-ci.yml").read_text())["pages"]
    assert pages["script"][-2:] == ["nox -s docs", "mv build/docs public"]
    assert pages["artifacts"]["paths"] == ["public"]
    assert [rule["if"] for rule in pages["rules"]] == [
        '$CI_PIPELINE_SOURCE == "push" && $CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH'
    ]


def test_every_workflow_asks_for_no_more_than_reading() -> None:
    for path in sorted(WORKFLOW.parent.glob("*.yml")):
        document = yaml.safe_load(path.read_text())
        assert document["permissions"] == {"contents": "read"}, path.name
        wider = {name for name, job in document["jobs"].items() if "permissions" in job}
        assert wider == ({"deploy"} if path == SITE else set()), path.name


def test_hooks_have_the_version_of_ruff_that_lint_has() -> None:
    repositories = {entry["repo"]: entry for entry in yaml.safe_load(HOOKS.read_text())["repos"]}
    ruff = repositories["https://github.com/astral-sh/ruff-pre-commit"]
    lint = [Requirement(text) for text in project()["dependency-groups"]["lint"] if isinstance(text, str)]
    (pin,) = (str(requirement.specifier) for requirement in lint if requirement.name == "ruff")
    assert f"=={ruff['rev'].removeprefix('v')}" == pin
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]
