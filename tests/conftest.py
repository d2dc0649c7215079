"""What several rooms' tests share. Must not import the stack: most tests run where it is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[1]
STACK_TESTS = Path(__file__).resolve().parent / "stack"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A warning is an error, but for tests that run the stack, whose warnings are not ours."""
    for item in items:
        if STACK_TESTS not in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error"), append=False)  # a test's own filter wins


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel of the checkout."""
    folder = tmp_path_factory.mktemp("distributions")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.fail(f"hatchling could not build the project:\n{built.stdout}{built.stderr}")
    return folder


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> Path:
    """The wheel of the checkout."""
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture
def run_installed(wheel: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs pytest in a folder of its own, with the unpacked wheel and without the checkout.

    A pure wheel is installed by unpacking it. The running environment may hold an editable installation of the
    checkout, which ``sitecustomize`` takes off the path again, in child processes too.
    """
    site, project = tmp_path / "site", tmp_path / "project"
    project.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "sitecustomize.py").write_text(
        f"import sys\nsys.path[:] = [entry for entry in sys.path if entry.rstrip('/') != {str(ROOT)!r}]\n"
    )

    def run(*arguments: str, timeout: float = 60.0, autoload: bool = False) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRLCOMPAT_"))}
        environment = {**kept, "PYTHONPATH": str(site)}
        if not autoload:
            environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "trlcompat", "-p", "no:cacheprovider", *arguments],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
