"""The pages that the build of the site makes, as they are made now; git has no copy of them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report import documentation
from pytest_trlcompat.matrix.report.documentation import made_pages, write_made_pages
from tests.docs.examples import ROOT
from tests.docs.test_links import links

LAYOUT = Layout(ROOT)


@pytest.fixture(scope="module")
def pages() -> Mapping[Path, str]:
    return made_pages(LAYOUT)


def test_every_known_issue_and_every_table_has_a_page(pages: Mapping[Path, str]) -> None:
    others = {
        *("compatibility.md", "cures.md", "explanation/findings.md", "explore/explore.html", "issues/index.md"),
        *("npu-branches.md", "reference/fields.md"),
    }
    expected = {*others, *(f"issues/{name}.md" for name in known_issues.load())}
    assert {path.relative_to(ROOT / "docs").as_posix() for path in pages} == expected
    for path, text in pages.items():
        assert text.startswith("<!doctype html>" if path.suffix == ".html" else "# "), path
        assert text.endswith("\n")


def test_git_ignores_every_one_and_tracks_none(pages: Mapping[Path, str]) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    paths = [str(path.relative_to(ROOT)) for path in pages]
    git = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    ignored = subprocess.run(
        ["git", "check-ignore", "--stdin"], cwd=ROOT, env=git, input="\n".join(paths), capture_output=True, text=True
    )
    assert sorted(ignored.stdout.splitlines()) == sorted(paths)
    tracked = subprocess.run(["git", "ls-files", *paths], cwd=ROOT, env=git, capture_output=True, text=True, check=True)
    assert tracked.stdout == ""


def test_links_of_made_pages_lead_to_pages(pages: Mapping[Path, str]) -> None:
    for path, text in pages.items():
        if path.suffix == ".md":
            targets = [Path(os.path.normpath(path.parent / target)) for target in links(text)]
            assert [target for target in targets if target not in pages and not target.is_file()] == [], path


def test_links_of_written_pages_lead_to_files_or_to_made_pages(pages: Mapping[Path, str]) -> None:
    written = [
        path for path in (ROOT / "docs").rglob("*.md") if path not in pages and LAYOUT.issues not in path.parents
    ]
    assert len(written) > 40
    for path in written:
        targets = [Path(os.path.normpath(path.parent / target)) for target in links(path.read_text(encoding="utf-8"))]
        assert [target for target in targets if target not in pages and not target.exists()] == [], path


def test_no_markup_of_a_made_page_is_open(pages: Mapping[Path, str]) -> None:
    for path, text in pages.items():
        if path == LAYOUT.page or path.parent == LAYOUT.issues:
            outside_code = re.sub(r"`[^`\n]*`", "", text)
            assert not re.search(r"<(?!!-- Made by|https?://)", outside_code), path.name
            assert all(line.endswith("|") for line in text.splitlines() if line.startswith("|"))


def test_the_overview_is_short(pages: Mapping[Path, str]) -> None:
    assert len(pages[LAYOUT.page].encode()) < 40_000


def test_what_has_not_changed_is_not_written_and_what_is_no_page_any_more_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(tmp_path)
    texts = {layout.issues / "a.md": "# a\n", layout.page: "# Compatibility\n"}
    monkeypatch.setattr(documentation, "made_pages", lambda layout: texts)
    assert write_made_pages(layout) == list(texts)
    os.utime(layout.page, ns=(1, 1))
    (layout.issues / "of-another-day.md").touch()
    (layout.issues / "a.md").write_text("# of another day")
    assert write_made_pages(layout) == [layout.issues / "a.md"]
    assert layout.page.stat().st_mtime_ns == 1
    assert {path: path.read_text() for path in layout.root.rglob("*.md")} == texts
