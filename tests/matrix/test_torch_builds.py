"""Builds of torch: from where they are installed, what they still need of the disk, and when they are removed."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_trlcompat.matrix import torch_builds
from pytest_trlcompat.matrix.cuda import CudaLibraries
from pytest_trlcompat.matrix.errors import DiskFull, Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.torch_builds import Need, install, needs, prune

HASH = f"--hash=sha256:{'0123456789abcdef' * 4}"
CUBLAS, BINDINGS, TORCH = "nvidia-cublas-cu12==12.4.5.8", "cuda-bindings==13.5.0", "torch==2.6.0"


class FakeUv:
    """A fake uv: has a cache, records what it installs, and creates the cache folder that it is given.

    Attributes:
        installed: requirement and the folder of the cache that it came from, empty for uv's own.
    """

    def __init__(self, environment: Path) -> None:
        self.cached: set[str] = set()
        self.folders: set[str] = set()
        self.cuda = True
        self.installed: list[tuple[str, str]] = []
        self.full: str | None = None
        self.site = environment / "lib" / "python3.11" / "site-packages"

    def offline(self, arguments: Sequence[str], *, stdin: str, offline: bool) -> str:
        assert offline
        assert "--require-hashes" in arguments
        wanted = _requirements(stdin.split())
        if not set(wanted) <= self.cached:
            raise Untestable("not in the cache")
        self._install(wanted, "")
        return ""

    def cached_first(self, arguments: Sequence[str], *, stdin: str = "") -> str:
        store = Path(arguments[arguments.index("--cache-dir") + 1]) if "--cache-dir" in arguments else None
        wanted = _requirements([*arguments, *stdin.split()])
        if "--no-index" in arguments and not set(wanted) <= self.folders:
            raise Untestable("no wheel folder has it")
        assert ("--require-hashes" in arguments) == ("--no-index" not in arguments)
        if store is not None:
            store.mkdir(parents=True)
        if self.full in wanted:
            raise DiskFull("the disk is full")
        self._install(wanted, store.name if store else "")
        return ""

    def would_install(self, arguments: Sequence[str]) -> str | None:
        wanted = _requirements(arguments)
        if not set(wanted) <= self.cached:
            return None
        return "".join(f" + {each}{'' if self.cuda else '+cpu'}\n" for each in wanted)

    def _install(self, wanted: Sequence[str], store: str) -> None:
        self.installed += [(requirement, store) for requirement in wanted]
        for requirement in wanted:
            name, _, version = requirement.partition("==")
            (self.site / f"{name.replace('-', '_')}-{version}.dist-info").mkdir(parents=True)
            if name == "torch":
                (self.site / "torch").mkdir()
                build = "'12.4'" if self.cuda else "None"
                (self.site / "torch" / "version.py").write_text(f"cuda: Optional[str] = {build}\n")


def _requirements(arguments: Sequence[str]) -> list[str]:
    return [argument for argument in arguments if "==" in argument and "/" not in argument]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


@pytest.fixture
def environment(layout: Layout) -> Path:
    return layout.environments / "cell-1"


@pytest.fixture
def uv(monkeypatch: pytest.MonkeyPatch, environment: Path) -> FakeUv:
    fake = FakeUv(environment)
    monkeypatch.setattr(torch_builds, "uv", fake.offline)
    monkeypatch.setattr(torch_builds, "uv_cached_first", fake.cached_first)
    monkeypatch.setattr(torch_builds, "uv_would_install", fake.would_install)
    monkeypatch.setattr(torch_builds, "libraries_of", _libraries)
    monkeypatch.setattr(torch_builds, "with_hashes", lambda lines, python, layout: [f"{line} {HASH}" for line in lines])
    monkeypatch.setattr(torch_builds, "of_pytorch_index", lambda line, *rest: f"{line}+cpu {HASH}")
    monkeypatch.setattr(torch_builds, "torch_backend", lambda environ: [])
    monkeypatch.setattr(torch_builds, "_can_link", lambda layout: True)
    return fake


def _libraries(torch: str, python: str, layout: Layout) -> CudaLibraries:
    """Two releases of torch share what they need."""
    sizes = {"torch": 1_000_000, "cuda-bindings": 10, "nvidia-cublas-cu12": 2_000_000}
    packages = dict(requirement.split("==") for requirement in (BINDINGS, CUBLAS))
    return CudaLibraries(torch, datetime.date(2025, 2, 1), packages, sizes)


def run(environment: Path, layout: Layout, torch: str = "2.6.0") -> list[str]:
    said: list[str] = []
    install(torch, "3.11", environment / "bin" / "python", layout, said.append)
    return said


def stores(layout: Layout) -> list[str]:
    """The packages that have a cache of their own."""
    return sorted(path.name for path in (layout.environments / "torch").iterdir() if path.is_dir())


def test_a_cpu_build_gets_no_cuda_libraries(uv: FakeUv, environment: Path, layout: Layout) -> None:
    uv.cached, uv.cuda = {TORCH}, False
    assert run(environment, layout) == []
    assert uv.installed == [(TORCH, "")]


def test_a_torch_in_a_wheel_folder_is_taken_as_it_is(uv: FakeUv, environment: Path, layout: Layout) -> None:
    uv.folders, uv.cuda = {TORCH}, False
    assert run(environment, layout) == []
    assert uv.installed == [(TORCH, "")]


def test_a_cuda_build_gets_its_libraries_and_says_so(uv: FakeUv, environment: Path, layout: Layout) -> None:
    uv.cached = {TORCH, CUBLAS, BINDINGS}
    assert run(environment, layout) == [
        "torch 2.6.0 is a CUDA build: its CUDA libraries are installed as well, without Triton"
    ]
    assert uv.installed == [(TORCH, ""), (BINDINGS, ""), (CUBLAS, "")]
    assert not (layout.environments / "torch").exists()


def test_downloads_go_into_a_separate_cache(uv: FakeUv, environment: Path, layout: Layout) -> None:
    uv.cached = {BINDINGS}
    run(environment, layout)
    assert uv.installed == [(TORCH, TORCH), (BINDINGS, ""), (CUBLAS, CUBLAS)]
    assert stores(layout) == [CUBLAS, TORCH]


def test_a_cpu_build_chosen_by_uv_stays_in_uvs_cache(
    uv: FakeUv, environment: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_builds, "torch_backend", lambda environ: ["--torch-backend", "cpu"])
    uv.cuda = False
    run(environment, layout)
    assert uv.installed == [(f"{TORCH}+cpu", "")]


def test_a_full_disk_leaves_no_partial_package(uv: FakeUv, environment: Path, layout: Layout) -> None:
    uv.full = CUBLAS
    with pytest.raises(DiskFull):
        run(environment, layout)
    assert stores(layout) == [BINDINGS, TORCH]


def test_only_missing_packages_need_space_and_shared_ones_count_once(
    uv: FakeUv, environment: Path, layout: Layout
) -> None:
    def need(*torches: str) -> list[Need]:
        return needs(torches, "3.11", layout)

    assert need("2.6.0") == [Need("2.6.0", 5_400_018)]  # 1.8 times the wheels
    assert need("2.6.0", "2.5.1", "2.6.0") == [Need("2.6.0", 5_400_018), Need("2.5.1", 1_800_000)]
    uv.cached = {TORCH, BINDINGS}
    assert need("2.6.0") == [Need("2.6.0", 3_600_000)]
    (layout.environments / "torch" / CUBLAS).mkdir(parents=True)
    assert need("2.6.0") == []
    uv.cached |= {CUBLAS}
    assert need("2.6.0", "2.5.1") == [Need("2.5.1", 1_800_000)]


def test_a_cached_cpu_build_needs_no_space(uv: FakeUv, layout: Layout) -> None:
    uv.cached, uv.cuda = {TORCH}, False
    assert needs(["2.6.0"], "3.11", layout) == []


def test_a_cpu_build_that_uv_chooses_is_counted_as_such(
    uv: FakeUv, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_builds, "torch_backend", lambda environ: ["--torch-backend", "cpu"])
    assert needs(["2.6.0", "2.5.1"], "3.11", layout) == [Need("2.6.0", 800_000_000), Need("2.5.1", 800_000_000)]
    uv.cached = {TORCH}
    assert needs(["2.6.0"], "3.11", layout) == []


def test_every_environment_is_counted_if_files_cannot_be_shared(
    uv: FakeUv, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_builds, "_can_link", lambda layout: False)
    uv.cached = {TORCH, CUBLAS, BINDINGS}
    assert needs(["2.6.0", "2.5.1", "2.6.0"], "3.11", layout) == [Need("2.6.0", 10_800_036), Need("2.5.1", 5_400_018)]
    uv.cuda = False
    assert needs(["2.6.0"], "3.11", layout) == [Need("2.6.0", 800_000_000)]


def test_files_can_be_shared_on_one_disk_alone(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_builds, "uv", lambda arguments: f"{layout.root}/not/there/yet\n")
    assert torch_builds._can_link(layout)
    monkeypatch.setattr(torch_builds, "uv", lambda arguments: "/proc/self\n")  # another file system
    assert not torch_builds._can_link(layout)


def test_unused_caches_are_removed(uv: FakeUv, environment: Path, layout: Layout) -> None:
    run(environment, layout)
    assert prune(layout, {}) == []
    for information in environment.glob("lib/*/*/*.dist-info"):
        information.rmdir()
    assert prune(layout, {"2.6.0": "3.11"}) == []
    assert prune(layout, {"2.5.1": "3.11"}) == [TORCH]  # which needs the same libraries
    assert prune(layout, {}) == [BINDINGS, CUBLAS]
    assert stores(layout) == []
