"""Environments: built once, safely, in the right order; rebuilt when half-built; the project installed into them."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import os
import py_compile
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from pytest_trlcompat.matrix.environments import ensure, ensure_tools, existing, prune, remove
from pytest_trlcompat.matrix.errors import DiskFull, MatrixError, Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.tools import ToolLock
from pytest_trlcompat.matrix.uv import WHEELS_ONLY

from .made_up import replace_uv

LOCK = Lock(
    "trl1.0.0", datetime.date(2026, 4, 2), "3.11", {"deepspeed": "0.18.9", "torch": "2.13.0", "trl": "1.0.0"}, "x"
)

HASH = f"--hash=sha256:{'0123456789abcdef' * 4}"


class FakeUv:
    """Makes folders like uv, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.refuse: tuple[str, BaseException] | None = None
        self.source: Path | None = None
        self.has_site_packages = False
        self.leaves_out: tuple[str, ...] = ()

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        stdin: str | None = None,
        offline: bool = False,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        arguments = [*(f"{name}={value}" for name, value in variables.items()), *arguments, *(stdin or "").split()]
        self.calls.append(arguments)
        if self.refuse is not None and self.refuse[0] in arguments:
            raise self.refuse[1]
        if arguments[0] == "venv":
            (Path(arguments[-1]) / "bin").mkdir(parents=True)
            (Path(arguments[-1]) / "bin" / "python").touch()
            if self.has_site_packages:
                modules_of(Path(arguments[-1])).mkdir(parents=True)
        if "--python" in arguments and arguments[0] != "venv":
            site_packages = modules_of(Path(arguments[arguments.index("--python") + 1]).parents[1])
            for name, _, version in (word.partition("==") for word in arguments if "==" in word):
                if name not in self.leaves_out:
                    put_distribution(site_packages, name, version)
        if self.source is not None and "torch==2.13.0+cpu" in arguments:
            module = modules_of(Path(arguments[arguments.index("--python") + 1]).parents[1]) / self.source.name
            module.parent.mkdir(parents=True, exist_ok=True)
            os.link(self.source, module)
        return ""

    def count(self, word: str) -> int:
        return sum(word in arguments for arguments in self.calls)


def put_distribution(site_packages: Path, name: str, version: str) -> None:
    """The metadata of a distribution, as an installer leaves it."""
    folder = site_packages / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def modules_of(root: Path) -> Path:
    return root / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


@pytest.fixture
def uv(monkeypatch: pytest.MonkeyPatch) -> FakeUv:
    fake = FakeUv()
    replace_uv(monkeypatch, fake)
    monkeypatch.setenv("UV_TORCH_BACKEND", "cpu")
    return fake


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    (tmp_path / "pyproject.toml").write_text("[project]")
    layout = Layout(tmp_path)
    layout.hashes.mkdir(parents=True)
    known = "".join(f"{line} {HASH}\n" for line in LOCK.requirements)
    for python in ("3.11", "3.12", "3.13"):
        (layout.hashes / f"{python}.txt").write_text(known)
    (layout.resolved_hashes).mkdir(parents=True)
    for python in ("3.11", "3.12", "3.13"):
        (layout.resolved_hashes / f"{python}-torch-cpu.txt").write_text(f"torch==2.13.0+cpu {HASH}\n")
    return layout


def test_deepspeed_is_built_beside_a_setuptools_that_torch_cannot_build_with(uv: FakeUv, layout: Layout) -> None:
    known = layout.hashes / "3.11.txt"
    known.write_text(f"{known.read_text()}setuptools==77.0.3 {HASH}\n")
    ensure(dataclasses.replace(LOCK, packages={**LOCK.packages, "setuptools": "77.0.3"}), layout)
    told = [arguments[0] for arguments in uv.calls if "deepspeed==0.18.9" in arguments]
    assert told == ["SETUPTOOLS_USE_DISTUTILS=stdlib"]
    assert uv.count("SETUPTOOLS_USE_DISTUTILS=stdlib") == 1


def test_the_recording_engine_is_put_there_by_this_project(uv: FakeUv, layout: Layout) -> None:
    lock = dataclasses.replace(LOCK, packages={**LOCK.packages, "vllm-recording": "0.8.5"})
    uv.has_site_packages = True
    environment = ensure(lock, layout)
    site_packages = modules_of(environment.root)
    assert not any("vllm" in word for arguments in uv.calls for word in arguments)
    text = (site_packages / "vllm-0.8.5+recording.dist-info" / "METADATA").read_text()
    assert text.splitlines()[1:] == ["Name: vllm", "Version: 0.8.5+recording"]
    engine = (site_packages / "vllm" / "__init__.py").read_text()
    assert "from pytest_trlcompat.inference.recording_engine.vllm import *" in engine
    assert list(site_packages.glob("*.pth")) == []


def test_deepspeed_comes_after_torch_without_isolation_and_the_project_last(uv: FakeUv, layout: Layout) -> None:
    environment = ensure(LOCK, layout)
    assert environment.root.parent == layout.environments
    python = str(environment.python)
    install = ["pip", "install", "--quiet", "--no-deps", "--python", python]
    wheels = [*install, *WHEELS_ONLY]
    assert WHEELS_ONLY[:2] == ("--only-binary", ":all:")
    hashed = ["--require-hashes", "-r", "-"]
    assert uv.calls == [
        ["venv", "--quiet", "--python", "3.11", str(environment.root)],
        [*wheels, *hashed, "torch==2.13.0+cpu", HASH],
        [*wheels, *hashed, "trl==1.0.0", HASH],
        [*wheels, "--no-build-isolation", *hashed, "deepspeed==0.18.9", HASH],
        [*install, "--no-build-isolation", "--editable", str(layout.root)],
    ]


def test_an_environment_is_shared_by_equal_locks_and_not_built_again(uv: FakeUv, layout: Layout) -> None:
    first = ensure(LOCK, layout)
    calls = len(uv.calls)
    same = Lock("other id", datetime.date(2020, 1, 1), LOCK.python, LOCK.packages, "y")
    assert ensure(same, layout) == first
    assert len(uv.calls) == calls
    assert ensure(Lock("trl1.0.0", LOCK.date, "3.12", LOCK.packages, "x"), layout) != first


def test_a_half_built_environment_is_built_again(uv: FakeUv, layout: Layout) -> None:
    uv.refuse = ("deepspeed==0.18.9", Untestable("no compiler"))
    with pytest.raises(Untestable, match="no compiler"):
        ensure(LOCK, layout)
    (litter,) = layout.environments.glob("cell-*/bin")
    (litter / "litter").touch()
    uv.refuse = None
    environment = ensure(LOCK, layout)
    assert uv.count("venv") == 2
    assert not (environment.root / "bin" / "litter").exists()


def test_several_at_once_build_it_once(uv: FakeUv, layout: Layout) -> None:
    threads = [threading.Thread(target=ensure, args=(LOCK, layout, lambda text: None)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert uv.count("venv") == 1
    assert len(uv.calls) == 5


def test_the_project_is_installed_again_when_its_metadata_changed(uv: FakeUv, layout: Layout) -> None:
    ensure(LOCK, layout)
    (layout.root / "pyproject.toml").write_text("[project]\nname = 'other'")
    ensure(LOCK, layout)
    assert (uv.count("venv"), uv.count("--editable")) == (1, 2)


def test_a_project_that_cannot_be_installed_is_no_cells_fault(uv: FakeUv, layout: Layout) -> None:
    uv.refuse = ("--editable", Untestable("README.md is missing"))
    with pytest.raises(
        MatrixError, match=r"this project itself could not be installed: README\.md is missing"
    ) as caught:
        ensure(LOCK, layout)
    assert not isinstance(caught.value, Untestable)


def test_a_full_disk_is_one_clear_message(uv: FakeUv, layout: Layout) -> None:
    uv.refuse = ("venv", OSError(errno.ENOSPC, "No space left on device", "/env"))
    with pytest.raises(
        MatrixError, match=r"^the disk is full \(/env\): free some space and run the same command again"
    ):
        ensure(LOCK, layout)


def test_an_unfinished_environment_is_removed_if_the_disk_is_full(uv: FakeUv, layout: Layout) -> None:
    uv.refuse = ("deepspeed==0.18.9", DiskFull("the disk is full"))
    with pytest.raises(DiskFull, match="the disk is full"):
        ensure(LOCK, layout)
    assert [path for path in layout.environments.glob("cell-*") if path.is_dir()] == []


def test_an_environment_in_use_is_not_removed(uv: FakeUv, layout: Layout) -> None:
    environment = ensure(LOCK, layout)
    said: list[str] = []
    with environment.used(), environment.used():  # as many as want to
        assert remove(LOCK, layout) is False
        prune(layout, [], said.append)
    assert environment.python.exists()
    assert remove(LOCK, layout) is True
    assert not environment.root.exists()
    assert remove(LOCK, layout) is False
    assert said == [f"{environment.root.name}: belongs to no lock, but is in use"]


def test_only_environments_that_belong_to_no_lock_are_removed(uv: FakeUv, layout: Layout) -> None:
    wanted = ensure(LOCK, layout)
    stray = ensure(Lock("trl1.0.0", LOCK.date, "3.12", LOCK.packages, "x"), layout)
    tools = ensure_tools(tool_lock(), layout)
    said: list[str] = []
    prune(layout, [LOCK], said.append)
    assert said == [f"{stray.root.name}: belongs to no lock, removed"]
    assert [wanted.python.exists(), stray.root.exists(), tools.python.exists()] == [True, False, True]
    prune(layout, [LOCK], said.append)
    assert len(said) == 1
    ensure(LOCK, layout)
    assert uv.count("venv") == 3  # what is left is whole


def test_a_new_environment_takes_over_what_another_compiled(uv: FakeUv, layout: Layout) -> None:
    uv.source = layout.root / "module.py"
    uv.source.write_text("value = 1")
    one, *others = [Lock("x", LOCK.date, python, LOCK.packages, "x") for python in ("3.11", "3.12", "3.13")]
    environment = ensure(one, layout)
    own = Path(py_compile.compile(str(modules_of(environment.root) / "module.py"), doraise=True) or "")
    environment.share_modules()
    for other in others:
        assert (modules_of(ensure(other, layout).root) / "__pycache__" / own.name).samefile(own)
    tools = ensure_tools(tool_lock(torch="2.13.0"), layout)  # operators has the torch of a stack
    assert (modules_of(tools.root) / "__pycache__" / own.name).samefile(own)
    shutil.rmtree(tools.root)
    prune(layout, [])
    assert list((layout.environments / "compiled").iterdir()) == []


def test_an_environment_exists_once_it_is_built(uv: FakeUv, layout: Layout) -> None:
    assert existing(LOCK, layout) is None
    environment = ensure(LOCK, layout)
    assert existing(LOCK, layout) == environment


def tool_lock(name: str = "lint", python: str = "3.11", **packages: str) -> ToolLock:
    return ToolLock(f"{name}-{python}", LOCK.date, python, packages or {"trl": "1.0.0"}, "x")


def test_an_environment_of_tools_is_keyed_by_its_lock(uv: FakeUv, layout: Layout) -> None:
    first = ensure_tools(tool_lock(), layout)
    assert ensure_tools(tool_lock(), layout) == first
    assert first.root.name.startswith("lint-")
    others = [tool_lock(torch="2.13.0"), tool_lock(python="3.12"), tool_lock("docs")]
    assert len({first.root, *(ensure_tools(lock, layout).root for lock in others)}) == 4
    assert uv.count("3.12") == 1
    assert uv.count("--editable") == 0
    ensure_tools(tool_lock("unit"), layout, project=True)
    assert uv.count("--editable") == 1


def test_tools_are_installed_from_files_whose_hashes_are_known(uv: FakeUv, layout: Layout) -> None:
    environment = ensure_tools(tool_lock(), layout)
    install = ["pip", "install", "--quiet", "--no-deps", "--python", str(environment.python), *WHEELS_ONLY]
    assert uv.calls[1:] == [[*install, "--require-hashes", "-r", "-", "trl==1.0.0", HASH]]


@pytest.mark.parametrize(
    ("change", "shortfall"),
    [
        ("trl-1.0.1", "trl is 1.0.0 and 1.0.1 where the lock says 1.0.0"),
        ("mypy-2.0", "mypy 2.0 is installed, and not in the lock"),
    ],
)
def test_tools_that_somebody_has_changed_are_refused_and_built_anew(
    uv: FakeUv, layout: Layout, change: str, shortfall: str
) -> None:
    """They went on with whatever was there: a linter of another release than all others have."""
    lock = tool_lock()
    root = ensure_tools(lock, layout).root
    put_distribution(modules_of(root), *change.split("-"))
    with pytest.raises(MatrixError) as raised:
        ensure_tools(lock, layout)
    assert f"{root} is not what the lock of lint-3.11 names: {shortfall}." in str(raised.value)
    said: list[str] = []
    prune(layout, [lock], said.append)
    assert said[0] == f"{root.name}: is not what its lock names ({shortfall}), removed"
    assert ensure_tools(lock, layout).root == root


def test_tools_of_an_earlier_lock_are_removed(uv: FakeUv, layout: Layout) -> None:
    earlier, current = tool_lock(), tool_lock(torch="2.13.0")
    ray = ensure_tools(tool_lock("lint-ray"), layout).root
    root = ensure_tools(earlier, layout).root
    said: list[str] = []
    prune(layout, [current], said.append)
    assert said == [f"{root.name}: belongs to no lock, removed"]
    assert ray.is_dir()  # of which nothing is known here


def test_compiled_extensions_of_environments_do_not_mix(uv: FakeUv, layout: Layout) -> None:
    one = ensure(LOCK, layout).variables
    other = ensure(Lock("x", LOCK.date, "3.12", LOCK.packages, "x"), layout).variables
    assert one["TORCH_EXTENSIONS_DIR"] != other["TORCH_EXTENSIONS_DIR"]
    assert one["PATH"].startswith(f"{one['VIRTUAL_ENV']}/bin:")


@pytest.mark.parametrize(
    "change, shortfall",
    [
        ("trl-1.0.1", "trl is 1.0.0 and 1.0.1 where the lock says 1.0.0"),
        ("verl-0.3.0", "verl 0.3.0 is installed, and not in the lock"),
        ("", "of 3 packages of the lock 1 is missing: trl"),
    ],
)
def test_an_environment_that_somebody_has_changed_is_refused(
    uv: FakeUv, layout: Layout, change: str, shortfall: str
) -> None:
    root = ensure(LOCK, layout).root
    if change:
        put_distribution(modules_of(root), *change.split("-"))
    else:
        shutil.rmtree(modules_of(root) / "trl-1.0.0.dist-info")
    with pytest.raises(MatrixError) as raised:
        ensure(LOCK, layout)
    assert str(raised.value) == (
        f"{root} is not what the lock of trl1.0.0 names: {shortfall}. Nothing was measured with it; `nox -s clean` "
        "removes it, and the next run builds it anew"
    )
    said: list[str] = []
    prune(layout, [LOCK], said.append)
    assert said[0] == f"{root.name}: is not what its lock names ({shortfall}), removed"
    assert ensure(LOCK, layout).root == root


def test_an_environment_into_which_not_all_was_installed_is_refused(uv: FakeUv, layout: Layout) -> None:
    uv.leaves_out = ("deepspeed",)
    with pytest.raises(MatrixError, match="of 3 packages of the lock 1 is missing: deepspeed"):
        ensure(LOCK, layout)


def test_what_belongs_beside_a_lock_is_allowed_and_named_where_it_matters(uv: FakeUv, layout: Layout) -> None:
    root = ensure(LOCK, layout).root
    for name in ("pytest-trlcompat", "coverage", "nvidia-nccl-cu12", "bitsandbytes"):
        put_distribution(modules_of(root), name, "9.9")
    said: list[str] = []
    ensure(LOCK, layout, said.append)
    assert said == [
        "trl1.0.0: bitsandbytes 9.9 is beside the lock: added by hand for the suites of QLoRA, see "
        "docs/explanation/limits.md",
        "trl1.0.0: nvidia-nccl-cu12 9.9 is beside the lock: CUDA libraries of a CUDA build of torch",
    ]
