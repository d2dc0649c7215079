"""What continuous integration runs of others: actions by commit, packages by version, also in the files of init-ci."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OURS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / "pytest_trlcompat" / "ci" / "templates").glob("*.yml"))
SHOWN = sorted((ROOT / "docs" / "how-to" / "ci").glob("*.yml"))
GITHUB = [path for path in (*OURS, *TEMPLATES, *SHOWN) if path.name != "gitlab.yml"]
SCRIPTS = [*OURS, *SHOWN, ROOT / ".gitlab-ci.yml", ROOT / ".ci" / "run"]
USED = re.compile(r"(?P<action>[\w.-]+/[\w./-]+)@(?P<commit>[0-9a-f]{40}) # v\d+\.\d+\.\d+")
COMMIT = re.compile(r"[0-9a-f]{40}")
RUNNER = "--require-hashes -r .ci/nox.txt"


def used(path: Path) -> list[str]:
    return re.findall(r"^\s*(?:- )?uses: *(.*)$", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_action_is_named_by_its_commit(path: Path) -> None:
    """A tag can be moved by whoever has, or got into, the action's repository."""
    assert used(path)
    assert [text for text in used(path) if not USED.fullmatch(text)] == []


def test_an_action_has_one_commit_everywhere() -> None:
    commits: dict[str, set[str]] = {}
    for path in GITHUB:
        for text in used(path):
            commits.setdefault(text.partition("@")[0], set()).add(text)
    assert set(commits) == {
        *("actions/cache", "actions/checkout", "actions/deploy-pages", "actions/download-artifact"),
        *("actions/setup-python", "actions/upload-artifact", "actions/upload-pages-artifact"),
    }
    assert {action: len(texts) for action, texts in commits.items()} == dict.fromkeys(commits, 1)


def steps() -> Iterator[tuple[str, dict[str, object]]]:
    for path in OURS:
        for job, content in yaml.safe_load(path.read_text())["jobs"].items():
            yield from ((f"{path.name}: {job}", step) for step in content["steps"])


def test_other_repositories_are_checked_out_at_a_commit() -> None:
    others = [step["with"] for _, step in steps() if "repository" in dict(step.get("with") or {})]  # type: ignore[call-overload]
    assert len(others) == 1
    assert [other for other in others if not COMMIT.fullmatch(str(dict(other).get("ref")))] == []  # type: ignore[call-overload]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_pip_installs_nothing_without_its_version(path: Path) -> None:
    commands = re.findall(r"python -m pip install (?:--quiet )?(.*)$", path.read_text(), re.MULTILINE)
    assert commands
    loose = [words for words in commands if words != RUNNER and not re.fullmatch(r"[\w-]+==[\d.]+", words)]
    # The command that README shows; it finds there what the one before it has installed.
    assert loose == (["nox uv"] if path.name == "run" else [])
    if loose:
        assert commands == [RUNNER, "nox uv"]
