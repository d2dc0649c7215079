"""Compiled modules: one copy for all environments that hold the same source, by real compilers, imports and links."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_trlcompat.matrix import compiled

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
TAG = sys.implementation.cache_tag
CHILD = """import sys
sys.path.insert(0, sys.argv[1])
from package.module import value
print(value(), value.__code__.co_filename)
"""


@dataclass(frozen=True)
class Environments:
    """Folders with a package of one module, whose sources are hard links to one cache, as uv makes them."""

    root: Path

    @property
    def cached(self) -> Path:
        return self.root / "cache.py"

    @property
    def store(self) -> Path:
        return self.root / "compiled"

    def new(self, name: str, python: str = PYTHON) -> Path:
        """The module of a new environment, not compiled."""
        if not self.cached.exists():
            self.cached.write_text("def value():\n    return 1\n")
        module = self.lib(name) / python / "package" / "module.py"
        module.parent.mkdir(parents=True)
        os.link(self.cached, module)
        return module

    def lib(self, name: str) -> Path:
        return self.root / name / "lib"

    def share(self, name: str) -> int:
        return compiled.share(self.lib(name), self.store)


@pytest.fixture
def environments(tmp_path: Path) -> Environments:
    return Environments(tmp_path)


def compile_module(module: Path) -> Path:
    result = py_compile.compile(str(module), doraise=True)
    assert result is not None
    return Path(result)


def imported(module: Path) -> tuple[str, str]:
    """What the module's function returns in a fresh process, and the file that its code names."""
    command = [sys.executable, "-c", CHILD, str(module.parents[1])]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    value, file = ran.stdout.split()
    return value, file


def test_environments_share_what_each_of_them_compiled(environments: Environments) -> None:
    own = [compile_module(environments.new(name)) for name in ("one", "two")]
    assert [environments.share(name) for name in ("one", "two")] == [1, 1]
    assert own[0].samefile(own[1])
    assert os.listdir(own[1].parent) == [own[1].name]  # nothing temporary is left
    assert [environments.share(name) for name in ("one", "two")] == [0, 0]


def test_python_uses_shared_modules_and_names_the_environments_own_source(environments: Environments) -> None:
    modules = [environments.new(name) for name in ("one", "two")]
    kept = compile_module(modules[0])
    environments.share("one")
    assert compiled.adopt(environments.lib("two"), environments.store) == 1
    assert [imported(module) for module in modules] == [("1", str(module)) for module in modules]
    own = modules[1].parent / "__pycache__" / kept.name
    assert own.samefile(kept)  # not compiled again


def test_a_source_that_one_environment_changes_is_its_own_again(environments: Environments) -> None:
    modules = [environments.new(name) for name in ("one", "two")]
    own = [compile_module(module) for module in modules]
    for name in ("one", "two"):
        environments.share(name)
    modules[1].unlink()
    modules[1].write_text("def value():\n    return 2222\n")
    assert [imported(module)[0] for module in modules] == ["1", "2222"]
    assert not own[0].samefile(own[1])
    assert environments.share("two") == 0  # no other environment has this source
    assert [imported(module)[0] for module in modules] == ["1", "2222"]


def test_modules_of_another_source_are_not_shared(environments: Environments) -> None:
    module = environments.new("one")
    own = compile_module(module)
    os.utime(environments.cached, (1, 1))  # of all its links
    assert environments.share("one") == 0
    own.write_bytes(b"torn")
    assert environments.share("one") == 0
    assert list(environments.store.iterdir()) == []


def test_only_what_plain_python_compiles_is_shared(environments: Environments) -> None:
    own = compile_module(environments.new("one"))
    plain = own.read_bytes()
    own.unlink()
    for name in (f"module.{TAG}-pytest-9.2.0.pyc", f"module.{TAG}.opt-1.pyc", f"nowhere.{TAG}.pyc", "module.pyc"):
        (own.parent / name).write_bytes(plain)
    (own.parent.parent / own.name).write_bytes(plain)  # not in a __pycache__
    assert environments.share("one") == 0
    assert list(environments.store.iterdir()) == []


def test_another_python_shares_nothing(environments: Environments) -> None:
    compile_module(environments.new("one"))
    environments.share("one")
    environments.new("other", "python3.5")
    assert compiled.adopt(environments.lib("other"), environments.store) == 0
    assert compiled.adopt(environments.lib("none"), environments.store) == 0


@pytest.mark.parametrize("how", [compiled.share, compiled.adopt])
def test_a_file_system_without_links_leaves_everything_as_it_was(
    how: Callable[[Path, Path], int], environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_module(environments.new("one"))
    environments.share("one")
    own = compile_module(environments.new("two"))
    before = own.read_bytes()
    if how is compiled.adopt:
        own.unlink()

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("Too many links")

    monkeypatch.setattr(os, "link", refuse)
    assert how(environments.lib("two"), environments.store) == 0
    assert [path.read_bytes() for path in own.parent.iterdir()] == ([before] if how is compiled.share else [])


def test_unused_modules_are_removed(environments: Environments) -> None:
    own = compile_module(environments.new("one"))
    environments.share("one")
    assert compiled.drop_unused(environments.store) == 0
    own.unlink()
    assert compiled.drop_unused(environments.store) == 1
    assert list(environments.store.iterdir()) == []
    assert compiled.drop_unused(environments.root / "none") == 0
