"""Where files are kept, in a checkout and for an installed package, and what a bisect imports."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_trlcompat.bisect import layouts
from pytest_trlcompat.bisect.layouts import InstalledLayout, find_layout, state_folder
from pytest_trlcompat.matrix import environments
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock

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


def test_an_environment_finds_the_installed_package_by_its_path_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def venv(arguments: Sequence[str], **_: object) -> str:
        assert arguments[0] == "venv", "the package was built or installed"
        (Path(arguments[-1]) / "bin").mkdir(parents=True)
        (Path(arguments[-1]) / "bin" / "python").touch()
        metadata = Path(arguments[-1]) / "lib" / "python3.11" / "site-packages" / "trl-1.0.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text("Name: trl\nVersion: 1.0.0\n")
        return ""

    monkeypatch.setattr(environments, "uv", venv)
    monkeypatch.setattr(environments, "install_hashed", lambda *_, **__: None)
    layout = InstalledLayout(tmp_path / "copy", tmp_path / "cache")
    lock = Lock("x", datetime.date(2026, 1, 1), "3.11", {"trl": "1.0.0"}, "x")
    environment = environments.ensure(lock, layout, lambda _: None)
    assert environment.variables["PYTHONPATH"] == str(tmp_path / "copy")
    assert list((environment.root / "lib").rglob("*.pth")) == []


def test_the_command_line_imports_neither_the_stack_nor_a_renderer() -> None:
    script = (
        "import sys, pytest_trlcompat.bisect.cli\n"
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'trl', 'jinja2', 'rich', 'pytest'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout == "[]\n"
