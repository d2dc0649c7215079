"""Several checkouts, or drivers of Ray, that share an environment: each of their processes imports its own project."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import packaging
import pytest

from pytest_trlcompat.bisect.candidates import ExecutionContext
from pytest_trlcompat.bisect.layouts import InstalledLayout
from pytest_trlcompat.matrix import environments
from pytest_trlcompat.matrix.engines.node import NodeLayout
from pytest_trlcompat.matrix.environments import Environment, ensure, ensure_tools, existing
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.suite_run import child_variables
from pytest_trlcompat.matrix.tools import ToolLock

from .made_up import replace_uv

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
LOCK = Lock(
    "trl0.17.0", datetime.date(2025, 4, 25), PYTHON, {"torchvision": "0.22.0", "vllm-recording": "0.8.5"}, "request"
)
TOOLS = ToolLock(f"unit-{PYTHON}", LOCK.date, PYTHON, {"torchvision": "0.22.0"}, "request")
TORCHVISION = {
    "torchvision/__init__.py": "",
    "torchvision/version.py": "__version__ = '0.22.0+cu126'\n",
    "torchvision/_meta_registrations.py": "",
    "torch.py": "class version:\n    cuda = None\n",
    "torchvision-0.22.0.dist-info/METADATA": "Name: torchvision\nVersion: 0.22.0\n",
}
LOOK = """
import pathlib, sys
import pytest_trlcompat, torchvision, vllm, vllm.utils
from importlib.metadata import version
assert vllm.__version__ == version("vllm") == "0.8.5+recording"
files = [
    pytest_trlcompat.__file__,
    vllm.utils.__file__,
    sys.modules[vllm.LLM.__module__].__file__,
    sys.modules["pytest_trlcompat.inference.torchvision_ops"].__file__,
]
print(pytest_trlcompat.__version__, *{pathlib.Path(file).relative_to(sys.argv[1]).parts[0] for file in files})
"""
"""Fails where a file lies outside the project that is named, and says the version of the package."""


class Uv:
    """Makes real environments, and installs nothing from an index; as editable, by the path alone."""

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        stdin: str | None = None,
        offline: bool = False,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        if arguments[0] == "venv":
            venv.create(arguments[-1], symlinks=True, with_pip=False)
            return ""
        python = Path(arguments[arguments.index("--python") + 1])
        site_packages = environments._site_packages(python.parents[1])
        if "--editable" in arguments:
            (site_packages / "_pytest_trlcompat.pth").write_text(f"{arguments[-1]}\n")
            return ""
        for name, text in TORCHVISION.items():
            (site_packages / name).parent.mkdir(exist_ok=True)
            (site_packages / name).write_text(text)
        shutil.copytree(Path(packaging.__file__).parent, site_packages / "packaging", dirs_exist_ok=True)
        return ""


@pytest.fixture
def uv(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_uv(monkeypatch, Uv())
    monkeypatch.setattr(environments, "with_hashes", lambda requirements, *_: list(requirements))


def project(folder: Path, version: str) -> Path:
    """A copy of this project that can be told from others."""
    shutil.copytree(
        ROOT / "pytest_trlcompat", folder / "pytest_trlcompat", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "pytest_trlcompat" / "__init__.py").write_text(f"__version__ = '{version}'\n")
    (folder / "pyproject.toml").write_text("[project]\n")
    return folder


def looked(environment: Environment, root: Path, variables: Mapping[str, str]) -> str:
    command = [str(environment.python), "-c", LOOK, str(root)]
    done = subprocess.run(command, env=dict(variables), cwd=root.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@dataclasses.dataclass(frozen=True)
class LinkedCheckout(Layout):
    """A checkout whose environments lie elsewhere, as where ``.nox`` is a link."""

    cache: Path

    @property
    def environments(self) -> Path:
        return self.cache / "envs"


LAYOUTS: dict[str, Callable[[Path, Path], Layout]] = {
    "checkouts": LinkedCheckout,
    "nodes of Ray": lambda root, cache: NodeLayout(root, cache, cache),
    "an installed package": InstalledLayout,
}


@pytest.mark.usefixtures("uv")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_each_process_imports_its_own_project(kind: str, tmp_path: Path) -> None:
    """Whoever came last wrote the path of its own project into the environment, for all that were there already."""
    roots = {version: project(tmp_path / f"project-{version}", version) for version in ("1.1", "2.2")}
    layouts = {version: LAYOUTS[kind](root, tmp_path / "cache") for version, root in roots.items()}
    seen, first = [], None
    for version in ("1.1", "2.2", "1.1"):
        first = first or ensure(LOCK, layouts[version])
        environment = ensure(LOCK, layouts[version])
        assert environment.root == first.root
        for other, root in roots.items():  # also the one that is not the last
            mine = existing(LOCK, layouts[other])
            assert mine is not None
            seen.append((other, looked(mine, root, child_variables(mine))))
    assert seen == [("1.1", "1.1 pytest_trlcompat"), ("2.2", "2.2 pytest_trlcompat")] * 3


@pytest.mark.usefixtures("uv")
def test_nothing_in_a_shared_environment_names_a_project(tmp_path: Path) -> None:
    root = project(tmp_path / "project", "1.1")
    environment = ensure(LOCK, NodeLayout(root, tmp_path / "cache", tmp_path / "cache"))
    texts = [path.read_text() for pattern in ("*.pth", "*.py") for path in environment.root.rglob(pattern)]
    assert len(texts) >= 3
    assert [text for text in texts if str(root) in text] == []


@pytest.mark.usefixtures("uv")
def test_the_path_that_an_earlier_release_wrote_is_removed(tmp_path: Path) -> None:
    layout = LinkedCheckout(project(tmp_path / "project", "1.1"), tmp_path / "cache")
    site_packages = environments._site_packages(ensure(LOCK, layout).root)
    earlier = site_packages / "vllm-recording.pth"
    earlier.write_text("/elsewhere\n")
    engine = site_packages / "vllm" / "__init__.py"
    before = engine.stat()
    ensure(LOCK, layout)
    assert not earlier.exists()
    assert engine.stat().st_ino == before.st_ino  # nobody who imports it now finds another file


@pytest.mark.usefixtures("uv")
def test_tools_that_import_the_project_get_the_checkouts(tmp_path: Path) -> None:
    roots = [project(tmp_path / name, name) for name in ("one", "two")]
    found = []
    for root in (*roots, roots[0]):
        environment = ensure_tools(TOOLS, LinkedCheckout(root, tmp_path / "cache"), project=True)
        found.append(environment.variables["PYTHONPATH"])
    assert found == [str(roots[0]), str(roots[1]), str(roots[0])]
    assert "PYTHONPATH" not in ensure_tools(TOOLS, Layout(roots[0])).variables


def test_what_a_bisection_puts_before_an_environment_does_not_hide_the_project(tmp_path: Path) -> None:
    context = ExecutionContext(Environment(tmp_path / "env", tmp_path / "project"), tmp_path, tmp_path / "overlay")
    assert context.variables["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "overlay"), str(tmp_path / "project")]
