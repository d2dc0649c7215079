"""What CONTRIBUTING and its how-tos name: files, folders and sessions that exist."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.examples import ROOT

PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "contributing").glob("*.md"))]
FILE_ENDINGS = (".py", ".toml", ".md", ".yml", ".txt", ".json", ".sh", ".pyi")
NOT_TRACKED = ("build/", ".nox/", "../", "https:")
"""How a path begins that a session makes, or that lies outside of the checkout."""
MADE_PAGES = [line.strip("/").removeprefix("docs/") for line in (ROOT / ".gitignore").read_text().splitlines()]
"""What the build of the site makes, as a page of the documentation names it."""
NO_PATHS = {
    "3/16": "a shard",
    "torch/nn/functional.py": "a module of PyTorch",
    "torch/version.py": "a module of PyTorch",
    "setup.py": "of a package that is built from source",
    "report.json": "in build/watch",
    "report.md": "in build/watch",
}


@cache
def tracked() -> frozenset[str]:
    """The files that git tracks and their folders, with ``/`` before and, for folders, behind."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in listing.split("\0") if name]
    folders = {f"/{folder.as_posix()}/" for path in files for folder in path.parents if folder != Path()}
    return frozenset(folders | {f"/{path.as_posix()}" for path in files})


@cache
def sessions() -> frozenset[str]:
    """Names of the sessions, read from the source: nox warns when a noxfile is imported a second time."""
    functions = [
        node for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    return frozenset(
        function.name
        for function in functions
        if any("nox.session" in ast.unparse(mark) for mark in function.decorator_list)
    )


def code_spans(text: str) -> Iterator[str]:
    """What stands in backticks, outside of blocks of code."""
    outside_blocks = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`([^`]+)`", outside_blocks)


def paths(text: str) -> Iterator[str]:
    """Words in code that are paths: they have a slash, or end as files do; a part that varies becomes ``*``."""
    for span in code_spans(text):
        for word in re.sub(r"<[^>]*>|NAME", "*", span).split():
            path = word.strip("(),;").rpartition("=")[2].replace("....", "*.").partition(":")[0]
            looks_like_path = "/" in path or path.endswith(FILE_ENDINGS)
            elsewhere = path.startswith(("/", *NOT_TRACKED)) or path.rstrip("/") in [*NO_PATHS, *MADE_PAGES]
            if looks_like_path and not elsewhere and "…" not in path:
                yield path


def exists(path: str) -> bool:
    """Whether git tracks it, at the root or, as a page names it in short, below a folder."""
    return bool(fnmatch.filter(tracked(), f"*/{path}") or fnmatch.filter(tracked(), f"*/{path.rstrip('/')}/"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    named = set(paths(page.read_text(encoding="utf-8")))
    assert sorted(path for path in named if not exists(path)) == []


def test_contributing_names_many_files() -> None:
    assert len(set(paths(PAGES[0].read_text(encoding="utf-8")))) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_sessions_exist(page: Path) -> None:
    named = set(re.findall(r"nox -s \"?(\w+)", page.read_text(encoding="utf-8")))
    assert named - sessions() == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`a/b.py` and `c.toml`, not `d.e` nor c/d.py", ["a/b.py", "c.toml"]),
        ("`issues/<trainer or area>/<id>.toml`", ["issues/*/*.toml"]),
        ("`suites/grpo/test_grpo_....py`", ["suites/grpo/test_grpo_*.py"]),
        ("`downstream/NAME/cases.py`", ["downstream/*/cases.py"]),
        ("`build/compat`, `--clone trl=../trl` and `--shard 3/16`", []),
        ("`tests/test_a.py::test_b`", ["tests/test_a.py"]),
        ("```\n`a/b.py`\n```\n", []),
    ],
)
def test_paths_are_read_from_code_alone(text: str, expected: list[str]) -> None:
    assert list(paths(text)) == expected


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("tests/docs/examples.py", True),
        ("docs/examples.py", True),
        ("tests/docs", True),
        ("tests/docs/", True),
        ("ocs/examples.py", False),
        ("tests/docs/no_such_*.py", False),
    ],
)
def test_a_path_exists_by_whole_parts(path: str, there: bool) -> None:
    assert exists(path) == there
