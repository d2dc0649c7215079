"""Where files are kept, in a checkout and for an installed package, and what a bisect imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat.bisect import layouts
from pytest_trlcompat.bisect.layouts import InstalledLayout, find_layout, state_folder
from pytest_trlcompat.matrix import environments
from pytest_trlcompat.matrix.layout import Layout

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_is_its_own_layout() -> None:
    assert find_layout() == Layout(ROOT)
    assert state_folder(Layout(ROOT)) == ROOT / "build" / "bisect"


def test_an_installed_package_is_copied_without_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    shutil.copytree(ROOT / "pytest_trlcompat", site / "pytest_trlcompat", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("suites", "fixtures"):
        shutil.copytree(ROOT / name, site / "pytest_trlcompat" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "pytest_trlcompat-0.dist-info").mkdir()
    (site / "pytest_trlcompat-0.dist-info" / "METADATA").write_text("Name: pytest-trlcompat\n")
    (site / "neighbour.py").touch()
    monkeypatch.setattr(layouts, "cache_folder", lambda: tmp_path / "cache")
    layout = find_layout(site / "pytest_trlcompat")
    assert isinstance(layout, InstalledLayout)
    assert find_layout(site / "pytest_trlcompat") == layout
    assert sorted(path.name for path in layout.root.iterdir()) == ["pytest_trlcompat", "pytest_trlcompat-0.dist-info"]
    assert layout.matrix.is_file()
    assert (layout.locks / "trl0.14.0-tf4.48.3.txt").is_file()
    assert (layout.suites / "conftest.py").is_file()
    assert layout.environments == tmp_path / "cache" / "envs"
    assert state_folder(layout) == tmp_path / "cache" / "bisect"


def test_an_environment_finds_the_installed_package_without_building_it(tmp_path: Path) -> None:
    project, root = tmp_path / "project", tmp_path / "env"
    site_packages = root / "lib" / "python3.11" / "site-packages"
    site_packages.mkdir(parents=True)
    project.mkdir()
    environments._install_project(root, Layout(project))
    assert (site_packages / "trlcompat.pth").read_text() == f"{project}\n"


def test_the_command_line_imports_neither_the_stack_nor_a_renderer() -> None:
    script = (
        "import sys, pytest_trlcompat.bisect.cli\n"
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'trl', 'jinja2', 'rich', 'pytest'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout == "[]\n"
