"""Installs builds of torch with their libraries, stores them once for all environments, and removes unused ones.

What uv's cache contains is installed from there. Packages that must be downloaded and may belong to a CUDA build of
several gigabytes get a cache of their own each, next to the environments. These share its files by hard links, and it
can be removed when none of them needs it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat.matrix.cuda import CudaLibraries, is_cuda_build, libraries_of
from pytest_trlcompat.matrix.errors import DiskFull, Untestable
from pytest_trlcompat.matrix.files import locked
from pytest_trlcompat.matrix.hashes import of_pytorch_index, with_hashes
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.uv import WHEELS_ONLY, torch_backend, uv, uv_cached_first, uv_would_install

__all__ = ["Need", "install", "needs", "prune"]

_HASHED = ("--require-hashes", "-r", "-")
"""Options of ``uv pip install``: requirements with their hashes come on standard input."""

_STORE = "torch"
"""The folder of these caches, among the environments."""

_UNPACKED = 1.8
"""Size on the disk of a wheel of torch or NVIDIA, relative to the wheel: 1.66 to 1.77 for torch 2.4.1 to 2.15.0."""
_CPU_BUILD = 800_000_000
"""Bytes on the disk of a CPU build that is missing here; its package index does not provide sizes."""


@dataclass(frozen=True)
class Need:
    """The disk space, in bytes, that the build of one torch still needs."""

    torch: str
    size: int


def install(torch: str, python: str, interpreter: Path, layout: Layout, say: Callable[[str], None]) -> None:
    """Install torch into an environment, and its CUDA libraries if the available build is a CUDA build.

    Args:
        python: the environment's Python, as uv understands it.
        interpreter: the path of the environment's Python.

    Raises:
        Untestable: when it cannot be installed, with uv's reason.
        DiskFull: when the disk is full.
    """
    requirement = f"torch=={torch}"
    command = ("pip", "install", "--quiet", "--no-deps", "--python", str(interpreter), *WHEELS_ONLY)
    options = torch_backend(os.environ)
    if options or os.environ.get("UV_TORCH_BACKEND"):
        _install_from_pytorch(requirement, python, command, options, layout, say)
    elif not _installed_from_folders(command, requirement):
        _install_each(with_hashes([requirement], python, layout), command, layout)
    if any(map(is_cuda_build, (interpreter.parents[1] / "lib").glob("python*/site-packages"))):
        say(f"torch {torch} is a CUDA build: its CUDA libraries are installed as well, without Triton")
        _install_each(with_hashes(libraries_of(torch, python, layout).requirements, python, layout), command, layout)


def needs(torches: Iterable[str], python: str, layout: Layout) -> list[Need]:
    """The disk space that builds need which are not on this machine yet.

    A library that two of them need is counted with the first.

    Args:
        torches: the releases of torch, one for each environment that is to be built.
    """
    linked = _can_link(layout)
    counted: set[str] = set()
    sizes: dict[str, int] = {}
    # If uv's cache is on another disk, files cannot be shared by links, and each environment has all of its own.
    for torch in dict.fromkeys(torches) if linked else torches:
        size = _missing(torch, python, layout, counted) if linked else _whole(torch, python, layout)
        sizes[torch] = sizes.get(torch, 0) + size
    return [Need(torch, size) for torch, size in sizes.items() if size]


def _can_link(layout: Layout) -> bool:
    """Whether uv's cache and the environments are on the same disk."""
    folders = (Path(uv(["cache", "dir"]).strip()), layout.environments)
    disks = {next(path for path in (folder, *folder.parents) if path.exists()).stat().st_dev for folder in folders}
    return len(disks) == 1


def prune(layout: Layout, torches: Mapping[str, str]) -> list[str]:
    """Remove the caches of packages that no environment of a cell contains and none of these releases of torch needs.

    Args:
        torches: releases of torch, and the Python of their environments.

    Returns:
        The removed packages, as ``name==version``.
    """
    needed = {f"torch=={torch}" for torch in torches}
    for torch, python in torches.items():
        needed.update(libraries_of(torch, python, layout).requirements)
    removed = []
    for store in sorted(path for path in _stores(layout).glob("*==*") if path.is_dir()):
        if store.name in needed:
            continue
        with _reserved(store):
            name, _, version = store.name.partition("==")
            # Metadata have underscores where the name has hyphens (PEP 427).
            information = f"lib/python*/site-packages/{name.replace('-', '_')}-{version}*.dist-info"
            if not any(layout.environments.glob(f"cell-*/{information}")):
                shutil.rmtree(store)
                removed.append(store.name)
    return removed


def _install_from_pytorch(
    requirement: str,
    python: str,
    command: Sequence[str],
    options: Sequence[str],
    layout: Layout,
    say: Callable[[str], None],
) -> None:
    """Install torch from PyTorch's own index, whose builds are other files than those of the package index."""
    backend = os.environ.get("UV_TORCH_BACKEND") or "cpu"
    line = of_pytorch_index(requirement, python, backend, options, layout)
    if line is None:
        say(f"{requirement}: PyTorch's index states no hash of its {backend} build, so that file is not checked")
        uv_cached_first([*command, *options, requirement])
        return
    uv_cached_first([*command, *options, *_HASHED], stdin=line)


def _installed_from_folders(command: Sequence[str], requirement: str) -> bool:
    """Install from the user's wheel folders, whose files are taken as they are; returns whether they have it."""
    try:
        uv_cached_first([*command, "--no-index", requirement])
    except Untestable:
        return False
    return True


def _install_each(lines: Sequence[str], command: Sequence[str], layout: Layout) -> None:
    """Install all from uv's cache, if it has them; else each from there or through its own cache.

    Args:
        lines: requirements with their hashes.
    """
    if _installed_offline(command, "\n".join(lines)):
        return
    for line in lines:
        store = _stores(layout) / line.split()[0]
        with _reserved(store):
            if store.is_dir() or not _installed_offline(command, line):
                _from_store(store, command, line)


def _installed_offline(command: Sequence[str], lines: str) -> bool:
    try:
        uv([*command, *_HASHED], stdin=lines, offline=True)
    except Untestable:
        return False
    return True


def _from_store(store: Path, command: Sequence[str], line: str) -> None:
    try:
        uv_cached_first([*command, *_HASHED, "--cache-dir", str(store)], stdin=line)
    # A part must not stay: where the folder is there, the whole package counts as there.
    except DiskFull:
        shutil.rmtree(store, ignore_errors=True)
        raise


def _missing(torch: str, python: str, layout: Layout, counted: set[str]) -> int:
    """Bytes on the disk of a torch and its libraries, without those on this machine or in ``counted``.

    Args:
        counted: packages that were counted before; those counted now are added.
    """
    # An empty target: uv would not count what an environment has already.
    with tempfile.TemporaryDirectory() as folder:
        command = ["pip", "install", "--no-deps", "--python", python, "--target", folder]
        cached, is_cpu_build = _build(torch, command)
        if is_cpu_build:
            return 0 if cached else _CPU_BUILD
        libraries = libraries_of(torch, python, layout)
        requirements = [f"torch=={torch}", *libraries.requirements]
        if cached and uv_would_install([*command, *requirements]) is not None:
            return 0
        missing = [
            requirement
            for requirement in requirements
            if requirement not in counted
            and not (_stores(layout) / requirement).is_dir()
            and uv_would_install([*command, requirement]) is None
        ]
    counted.update(missing)
    return _unpacked(libraries, missing)


def _whole(torch: str, python: str, layout: Layout) -> int:
    """Bytes on the disk of a torch and all its libraries."""
    with tempfile.TemporaryDirectory() as folder:
        _, is_cpu_build = _build(torch, ["pip", "install", "--no-deps", "--python", python, "--target", folder])
    if is_cpu_build:
        return _CPU_BUILD
    libraries = libraries_of(torch, python, layout)
    return _unpacked(libraries, [f"torch=={torch}", *libraries.requirements])


def _build(torch: str, command: Sequence[str]) -> tuple[bool, bool]:
    """Whether uv's cache has a build of this torch, and whether the available build is a CPU build."""
    options = torch_backend(os.environ)
    would_install = uv_would_install([*command, *options, f"torch=={torch}"])
    # uv names a build by the local part of its version.
    is_cpu_build = would_install is not None and f"torch=={torch}+cpu" in would_install
    return would_install is not None, bool(options) or is_cpu_build


def _unpacked(libraries: CudaLibraries, requirements: Iterable[str]) -> int:
    return int(_UNPACKED * sum(libraries.sizes.get(requirement.partition("==")[0], 0) for requirement in requirements))


def _stores(layout: Layout) -> Path:
    return layout.environments / _STORE


def _reserved(store: Path) -> contextlib.AbstractContextManager[None]:
    """Prevent the removal of a package's cache while the package is installed from it."""
    return locked(store.parent / f".{store.name}.lock")
