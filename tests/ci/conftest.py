"""A machine on which steps run, and what it takes from this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat.matrix.uv import find_uv

from .steps import Runner

STACK = "transformers==4.50.3"
"""What a project needs that is small enough to be installed here: the one package of the stack that needs no torch."""
TRL = "trl==0.17.0"
WITHOUT = tuple(f"{name}; sys_platform == 'none'" for name in ("accelerate", "datasets", "rich"))
"""What it needs and does not get: with torch a project would take gigabytes."""
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
_KEPT = ("PIP_", "UV_", "SSL_", "REQUESTS_", "HTTP_", "HTTPS_", "NO_PROXY", "http_", "https_", "no_proxy", "TMPDIR")


@pytest.fixture(scope="session")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The package index and uv's cache of this machine; without the index, where the cache has all that is needed."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    cache = subprocess.run([find_uv(), "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    found["UV_CACHE_DIR"] = cache
    overrides = tmp_path_factory.mktemp("overrides") / "overrides.txt"
    overrides.write_text("\n".join(WITHOUT))
    wanted = ["pip", "compile", "--quiet", "--offline", "--python-version", HERE, "--overrides", str(overrides), "-"]
    text = "\n".join([STACK, TRL, "pytest", "packaging", "cloudpickle", "iniconfig"])
    offline = subprocess.run([find_uv(), *wanted], input=text, capture_output=True, text=True, check=False)
    return {**found, "UV_OFFLINE": "1"} if offline.returncode == 0 else found


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory, variables: dict[str, str]) -> Path:
    """A user's folder with the ``python`` of the steps; made once, since that takes seconds."""
    folder = tmp_path_factory.mktemp("home")
    Runner(folder, folder, variables).make_python()
    return folder


@pytest.fixture
def machine(tmp_path: Path, home: Path, variables: dict[str, str]) -> Runner:
    """A machine with a project in which there is nothing yet."""
    project = tmp_path / "project"
    project.mkdir()
    return Runner(project, home, variables)


@pytest.fixture
def vendored(machine: Runner, wheel: Path) -> str:
    """The wheel of this checkout within the project, as ``--from`` names it."""
    (machine.folder / "vendor").mkdir()
    shutil.copy(wheel, machine.folder / "vendor")
    return f"vendor/{wheel.name}"
