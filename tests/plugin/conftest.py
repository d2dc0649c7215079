"""A judge, pytest with the plugin in a folder of its own, and the doctor's small catalogue, which its header uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.plugin import settings
from pytest_trlcompat.plugin.judging import Judge

from ..doctor.conftest import small
from .judged import ISSUE
from .running import PLUGIN, ROOT, STACK, Run

__all__ = ["small"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "cell.jsonl"


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, results: Path) -> Judge:
    """With trl 0.15.2, for which the catalogue predicts ``broken`` for upstream."""
    monkeypatch.setattr(stack, "installed", lambda: {"trl": "0.15.2", "accelerate": "1.7.0"})
    return Judge(issue=known_issues.load().get_issue(ISSUE), results=results)


@pytest.fixture
def installed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a stack as far as metadata goes, and modules that tell when they are imported."""
    site = pytester.mkdir("site")
    for package in stack.PACKAGES:
        (site / f"{package}.py").write_text("")
        if package in STACK:
            folder = site / f"{package}-{STACK[package]}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {STACK[package]}\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return site


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, installed: Path) -> Run:
    """pytest with this plugin and no other, in this process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in [name for name in os.environ if name.startswith("TRLCOMPAT_")]:
        monkeypatch.delenv(name)
    # The result on a machine with a GPU is tested in test_settings.py.
    monkeypatch.setattr(settings, "cuda_obstacle", lambda: "there is no NVIDIA device")

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", PLUGIN, *arguments)

    return run
