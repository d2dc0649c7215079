"""Builds of torch: installed together with what they need, kept once for all environments, and removed when unused.

What uv's own cache holds already comes from there. What has to be fetched and may be a CUDA build, gigabytes of it,
comes into a cache of its own for each package beside the environments: they share its files by hard links, and it can
be removed when none of them needs it. Imports only the standard library and this room.
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
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.uv import torch_backend, uv, uv_cached_first, uv_would_install

__all__ = ["Need", "install", "needs", "prune"]

_STORE = "torch"
"""The folder, among the environments, of the caches."""

_UNPACKED = 1.8
"""A wheel of torch or NVIDIA takes so many times its size on the disk: 1.66 to 1.77 for torch 2.4.1 to 2.15.0."""
_CPU_BUILD = 800_000_000
"""Bytes on the disk of a CPU build that is not there yet, whose size the index of the packages does not tell."""


@dataclass(frozen=True)
class Need:
    """What the build of one torch still needs of the disk, in bytes."""

    torch: str
    size: int


def install(torch: str, python: str, interpreter: Path, layout: Layout, say: Callable[[str], None]) -> None:
    """Install a torch into an environment, and its CUDA libraries where the one that is to be had is a CUDA build.

    Args:
        python: the environment's Python, as uv understands it.
        interpreter: of the environment.

    Raises:
        Untestable: when it cannot be had, with uv's reason.
        DiskFull: when there is no space for it.
    """
    requirement = f"torch=={torch}"
    command = ("pip", "install", "--quiet", "--no-deps", "--python", str(interpreter))
    if options := torch_backend(os.environ):
        uv_cached_first([*command, *options, requirement])
    else:
        _install_each([requirement], command, layout)
    if any(map(is_cuda_build, (interpreter.parents[1] / "lib").glob("python*/site-packages"))):
        say(f"torch {torch} is a CUDA build: its CUDA libraries are installed as well, without Triton")
        _install_each(libraries_of(torch, python, layout).requirements, command, layout)


def needs(torches: Iterable[str], python: str, layout: Layout) -> list[Need]:
    """What builds that are not on this machine yet would take of the disk; those that are there are left out.

    A library that two of them need is counted with the first. Where uv's cache lies on another disk than the
    environments, its files cannot be shared by links: then each environment is counted, with all that it holds.

    Args:
        torches: of the environments that are to be built, one for each.
    """
    linked = _can_link(layout)
    counted: set[str] = set()
    sizes: dict[str, int] = {}
    for torch in dict.fromkeys(torches) if linked else torches:
        size = _missing(torch, python, layout, counted) if linked else _whole(torch, python, layout)
        sizes[torch] = sizes.get(torch, 0) + size
    return [Need(torch, size) for torch, size in sizes.items() if size]


def _can_link(layout: Layout) -> bool:
    """Whether uv's cache and the environments lie on one disk."""
    folders = (Path(uv(["cache", "dir"]).strip()), layout.environments)
    disks = {next(path for path in (folder, *folder.parents) if path.exists()).stat().st_dev for folder in folders}
    return len(disks) == 1


def prune(layout: Layout, wanted: Mapping[str, str]) -> list[str]:
    """Remove what no environment of a cell holds any more, and no wanted torch needs.

    Args:
        wanted: releases of torch, and the Python of their environments.

    Returns:
        The names and versions of what was removed.
    """
    needed = {f"torch=={torch}" for torch in wanted}
    for torch, python in wanted.items():
        needed.update(libraries_of(torch, python, layout).requirements)
    removed = []
    for store in sorted(path for path in _stores(layout).glob("*==*") if path.is_dir()):
        if store.name in needed:
            continue
        with _reserved(store):
            name, _, version = store.name.partition("==")
            information = f"lib/python*/site-packages/{name.replace('-', '_')}-{version}*.dist-info"
            if not any(layout.environments.glob(f"cell-*/{information}")):
                shutil.rmtree(store)
                removed.append(store.name)
    return removed


def _install_each(requirements: Sequence[str], command: Sequence[str], layout: Layout) -> None:
    """From uv's own cache where that holds all; else each from there, or from the cache of its own."""
    if _installed_offline([*command, *requirements]):
        return
    for requirement in requirements:
        store = _stores(layout) / requirement
        with _reserved(store):
            if store.is_dir() or not _installed_offline([*command, requirement]):
                _from_store(store, [*command, requirement])


def _installed_offline(command: Sequence[str]) -> bool:
    try:
        uv(command, offline=True)
    except Untestable:
        return False
    return True


def _from_store(store: Path, command: Sequence[str]) -> None:
    try:
        uv_cached_first([*command, "--cache-dir", str(store)])
    except DiskFull:
        shutil.rmtree(store, ignore_errors=True)
        raise


def _missing(torch: str, python: str, layout: Layout, counted: set[str]) -> int:
    """Bytes on the disk of a torch and what it needs, as far as neither this machine nor ``counted`` has it.

    Args:
        counted: takes it up.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["pip", "install", "--no-deps", "--python", python, "--target", folder]
        there, is_cpu_build = _build(torch, command)
        if is_cpu_build:
            return 0 if there else _CPU_BUILD
        libraries = libraries_of(torch, python, layout)
        wanted = [f"torch=={torch}", *libraries.requirements]
        if there and uv_would_install([*command, *wanted]) is not None:
            return 0
        missing = [
            requirement
            for requirement in wanted
            if requirement not in counted
            and not (_stores(layout) / requirement).is_dir()
            and uv_would_install([*command, requirement]) is None
        ]
    counted.update(missing)
    return _unpacked(libraries, missing)


def _whole(torch: str, python: str, layout: Layout) -> int:
    """Bytes on the disk of a torch and all that it needs."""
    with tempfile.TemporaryDirectory() as folder:
        _, is_cpu_build = _build(torch, ["pip", "install", "--no-deps", "--python", python, "--target", folder])
    if is_cpu_build:
        return _CPU_BUILD
    libraries = libraries_of(torch, python, layout)
    return _unpacked(libraries, [f"torch=={torch}", *libraries.requirements])


def _build(torch: str, command: Sequence[str]) -> tuple[bool, bool]:
    """Whether uv's cache has a build of this torch, and whether the build that is to be had is one for CPUs alone."""
    options = torch_backend(os.environ)
    said = uv_would_install([*command, *options, f"torch=={torch}"])
    return said is not None, bool(options) or (said is not None and f"torch=={torch}+cpu" in said)


def _unpacked(libraries: CudaLibraries, requirements: Iterable[str]) -> int:
    return int(_UNPACKED * sum(libraries.sizes.get(requirement.partition("==")[0], 0) for requirement in requirements))


def _stores(layout: Layout) -> Path:
    return layout.environments / _STORE


def _reserved(store: Path) -> contextlib.AbstractContextManager[None]:
    """While a package is installed from its cache, nobody may remove that."""
    return locked(store.parent / f".{store.name}.lock")
