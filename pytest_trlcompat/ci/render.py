"""The file for GitHub or GitLab, from its template and what a project says."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from pytest_trlcompat._data import fixtures
from pytest_trlcompat.ci.project import Project

__all__ = ["KINDS", "render"]

KINDS = ("github", "gitlab")
_TEMPLATES = Path(__file__).parent / "templates"
_SLOT = re.compile(r"^( *)(.*?)<<([A-Z]+)>>", re.MULTILINE)
_INDENT = {"github": 10, "gitlab": 6}
"""Of a step's script."""


def render(kind: str, project: Project, origin: str) -> str:
    """The text of the file.

    Args:
        kind: one of :data:`KINDS`.
        origin: where this package is installed from.
    """
    several = len(project.stacks) > 1
    listed = json.dumps(list(project.pythons))
    stacks = json.dumps(list(project.stacks))
    environment = [f"PYTEST_TRLCOMPAT: {json.dumps(origin)}"]
    if several and kind == "github":
        environment.append("STACK: ${{ matrix.stack }}")
    if project.stacks not in (("uv.lock",), ("pylock.toml",)):
        environment.append("UV_TORCH_BACKEND: cpu # saves gigabytes; leave it out where your requirements name a build")
    script = _INDENT[kind]
    if kind == "github":
        matrix = textwrap.indent(f"python: {listed}" + (f"\nstack: {stacks}" * several), " " * 8)
    else:
        matrix = textwrap.indent(f"- PYTHON: {listed}" + (f"\n  STACK: {stacks}" * several), " " * 6)
    slots = {
        "MATRIX": matrix,
        "ENVIRONMENT": textwrap.indent("\n".join(environment), " " * (6 if kind == "github" else 4)),
        "HASHED": ", ".join(f"'{name}'" for name in (*project.stacks, *project.more) or ("pyproject.toml",)),
        "INSTALL": _lines(_install(project), script),
        "DOCTOR": _lines(_doctor(project), script),
        "TEST": _lines(_test(project), script),
    }
    template = (_TEMPLATES / f"{kind}.yml").read_text(encoding="utf-8")
    return _SLOT.sub(lambda slot: f"{slot[1]}{slot[2]}{slots[slot[3]]}", template)


def _lines(commands: Sequence[str], indent: int) -> str:
    return textwrap.indent("\n".join(commands), " " * indent)


def _stack(project: Project) -> str:
    return '"$STACK"' if len(project.stacks) > 1 else shlex.quote(project.stacks[0])


def _uv_version() -> str:
    """The release of uv with which this project's own environments are built."""
    # The lock names one release: without it a runner would take whatever uv is new that day.
    lock = (fixtures() / "locks" / "tools" / "nox-3.11.txt").read_text(encoding="utf-8")
    return next(line for line in lock.splitlines() if line.startswith("uv==")).removeprefix("uv==")


def _install(project: Project) -> list[str]:
    ours = 'pytest "$PYTEST_TRLCOMPAT"'
    prepare = [f"python -m pip install uv=={_uv_version()}", 'uv venv --python "$PYTHON"']
    if project.stacks == ("uv.lock",):
        tests = f" --extra {project.extra}" if project.extra else f" --group {project.group}" if project.group else ""
        # Last, since uv sync removes what the lock does not have; so does uv pip sync below.
        return [prepare[0], f'uv sync --frozen --python "$PYTHON"{tests}', f"uv pip install {ours}"]
    if project.stacks == ("pylock.toml",):
        itself = "--no-deps -e ." if project.installed else ""
        return [
            *prepare,
            "uv pip sync pylock.toml",
            *([f"uv pip install {itself}"] * bool(itself)),
            f"uv pip install {ours}",
        ]
    files = [_stack(project)] if project.stacks else []
    files += [shlex.quote(name) for name in project.more]
    words = [f"-r {name}" for name in files]
    if project.installed:
        words.append(f'-e ".[{project.extra}]"' if project.extra else "-e .")
    if project.group:
        words.append(f"--group {project.group}")
    return [*prepare, f"uv pip install {' '.join(words)} {ours}"]


def _doctor(project: Project) -> list[str]:
    if project.stacks:
        option = "" if project.stacks in (("uv.lock",), ("pylock.toml",)) else "-r "
        what = f' {option}{_stack(project)} --python "$PYTHON" --platform linux'
    else:
        what = ""  # what is installed
    return [
        "status=0",
        f"trlcompat doctor{what} > doctor.txt 2>&1 || status=$?",
        "cat doctor.txt",
        "# 1: a known issue affects them, which need not stop this run. 2: there is no answer.",
    ]


def _test(project: Project) -> list[str]:
    tests = "".join(f" {shlex.quote(name)}" for name in project.tests)
    return [f"pytest -p trlcompat --junitxml=junit.xml{tests} 2>&1 | tee pytest.txt"]
