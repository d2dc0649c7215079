"""Environments: virtual environments that hold a lock, built once by uv, shared by every session that needs the lock.

Imports only the standard library and this room.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat.matrix import compiled, torch_builds
from pytest_trlcompat.matrix.errors import DiskFull, MatrixError, Untestable
from pytest_trlcompat.matrix.files import in_use, locked, said_plainly, unless_in_use, write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.uv import uv, uv_cached_first

__all__ = ["Environment", "drop_unused", "ensure", "ensure_tools", "prune", "remove", "standing"]

_FORMAT = "1"
"""Part of every environment's key; raise it when environments are built in another way."""

_STAMP = "trlcompat-built.json"
_SOURCE_ONLY = ("deepspeed",)
_BUILDS_PROJECT = ("hatchling", "editables")
_COMPILED = "compiled"
"""The folder, among the environments, of the compiled modules that they share."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that is ready to use."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def variables(self) -> dict[str, str]:
        """What a process in this environment needs: its own programs first, and its own folder for compiled
        extensions, since an operator built for one DeepSpeed must not be loaded by another."""
        return {
            "VIRTUAL_ENV": str(self.root),
            "PATH": os.pathsep.join([str(self.root / "bin"), os.environ.get("PATH", os.defpath)]),
            "TORCH_EXTENSIONS_DIR": str(self.root / "torch_extensions"),
            "PYTHONNOUSERSITE": "1",
        }

    def used(self) -> contextlib.AbstractContextManager[None]:
        """For the block, nobody removes it."""
        return in_use(_users(self.root))

    def share_modules(self) -> None:
        """Have one copy of its compiled modules with the environments beside it."""
        compiled.share(self._modules, self.root.parent / _COMPILED)

    def adopt_modules(self) -> None:
        """Take over what the environments beside it have compiled of the same sources."""
        compiled.adopt(self._modules, self.root.parent / _COMPILED)

    @property
    def _modules(self) -> Path:
        return self.root / "lib"


def ensure(lock: Lock, layout: Layout, say: Say = print) -> Environment:
    """The environment of a lock, with this project installed editable; built unless it stands.

    Where the torch that is to be had is a CUDA build, it gets the libraries of that as well.

    Raises:
        Untestable: when it cannot be built, with uv's reason.
        DiskFull: when there is no room; what was built of it is removed.
        MatrixError: when the machine refuses otherwise.
    """
    root = _root(lock, layout)
    source_only = [line for line in lock.requirements if line.partition("==")[0] in _SOURCE_ONLY]
    wheels = [line for line in lock.requirements if line not in source_only and not line.startswith("torch==")]

    def fill(python: str) -> None:
        install = ("pip", "install", "--quiet", "--no-deps", "--python", python)
        if "torch" in lock.packages:
            torch_builds.install(lock.packages["torch"], lock.python, Path(python), layout, say)
        uv_cached_first([*install, *wheels])
        if source_only:
            uv_cached_first([*install, "--no-build-isolation", *source_only])
        Environment(root).adopt_modules()

    with said_plainly(), locked(root.with_suffix(".lock"), lambda: say(f"{root.name}: another process builds it")):
        _build(root, lock.python, fill, lambda: say(f"{lock.cell_id}: building its environment {root.name}"))
        _install_project(root, layout)
    return Environment(root)


def standing(lock: Lock, layout: Layout) -> Environment | None:
    """The environment of a lock, if it is built already."""
    root = _root(lock, layout)
    return Environment(root) if _stands(root) else None


def ensure_tools(
    name: str,
    requirements: Sequence[str],
    layout: Layout,
    say: Say = print,
    *,
    project: bool = False,
    python: str | None = None,
) -> Environment:
    """A small environment of some tools; built unless it stands.

    Args:
        project: install this project editable as well.
        python: the interpreter, as uv understands it (``3.12``); ``None``: the running one.

    Raises:
        Untestable: when it cannot be built, with uv's reason.
    """
    wanted = [*requirements, *(_BUILDS_PROJECT if project else ())]
    root = layout.environments / f"{name}-{_digest(_FORMAT, python or sys.version, *wanted)}"

    def fill(python: str) -> None:
        uv_cached_first(["pip", "install", "--quiet", "--python", python, *wanted])

    with said_plainly(), locked(root.with_suffix(".lock"), lambda: say(f"{root.name}: another process builds it")):
        _build(root, python or sys.executable, fill, lambda: say(f"building {root.name}"))
        if project:
            _install_project(root, layout)
    return Environment(root)


def prune(layout: Layout, wanted: Iterable[Lock], say: Say = print) -> None:
    """Remove the environments of cells that none of the locks asks for: locks change, and each has its own.

    One that is in use stays, and what only removed ones held goes as well.

    Raises:
        MatrixError: when one cannot be removed.
    """
    kept = {_root(lock, layout) for lock in wanted}
    found = {path for path in layout.environments.glob("cell-*") if path.is_dir()}
    for root in sorted(found - kept):
        removed = _remove(root, say)
        say(f"{root.name}: no lock asks for it, {'removed' if removed else 'but it is in use'}")
    drop_unused(layout, say)


def remove(lock: Lock, layout: Layout, say: Say = print) -> bool:
    """Remove the environment of a lock; returns whether there was one, and nobody used it.

    Raises:
        MatrixError: when it cannot be removed.
    """
    root = _root(lock, layout)
    return root.is_dir() and _remove(root, say)


def drop_unused(layout: Layout, say: Say = print, wanted: Iterable[Lock] = ()) -> None:
    """Remove what environments share and none of them holds any more: compiled modules, builds of torch.

    Args:
        wanted: locks whose builds of torch stay.

    Raises:
        MatrixError: when something cannot be removed.
    """
    with said_plainly():
        compiled.drop_unused(layout.environments / _COMPILED)
        needed = {lock.packages["torch"]: lock.python for lock in wanted if "torch" in lock.packages}
        for name in torch_builds.prune(layout, needed):
            say(f"{name}: no environment holds it, removed")


def _remove(root: Path, say: Say) -> bool:
    waiting = functools.partial(say, f"{root.name}: another process builds it; waiting")
    with said_plainly(), locked(root.with_suffix(".lock"), waiting), unless_in_use(_users(root)) as free:
        if free:
            shutil.rmtree(root)  # its lock files stay, since another process may be waiting for it
        return free


def _users(root: Path) -> Path:
    return root.with_suffix(".used")


def _root(lock: Lock, layout: Layout) -> Path:
    return layout.environments / f"cell-{_digest(_FORMAT, lock.digest)}"


def _build(root: Path, interpreter: str, fill: Callable[[str], None], starting: Callable[[], None]) -> None:
    """Build in place, because scripts in ``bin`` hold absolute paths; the stamp, written last, says it is whole."""
    if _stands(root):
        return
    starting()
    shutil.rmtree(root, ignore_errors=True)
    try:
        with said_plainly():
            uv(["venv", "--quiet", "--python", interpreter, str(root)], offline=Path(interpreter).is_absolute())
            fill(str(root / "bin" / "python"))
            write_whole(root / _STAMP, json.dumps({"format": _FORMAT}))
    except DiskFull:
        shutil.rmtree(root, ignore_errors=True)
        raise


def _stands(root: Path) -> bool:
    return (root / _STAMP).is_file() and (root / "bin" / "python").exists()


def _install_project(root: Path, layout: Layout) -> None:
    """Install this checkout editable, again when its metadata (entry points, dependencies) changed."""
    if not (layout.root / "pyproject.toml").is_file():
        _point_at(layout.root, root)
        return
    stamp = root / "trlcompat-project.txt"
    wanted = _digest(str(layout.root), (layout.root / "pyproject.toml").read_text(encoding="utf-8"))
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    install = ("pip", "install", "--quiet", "--no-deps", "--python", str(root / "bin" / "python"))
    try:
        uv([*install, "--no-build-isolation", "--editable", str(layout.root)], offline=True)
    except Untestable as error:
        raise MatrixError(f"this project itself could not be installed: {error}") from error
    write_whole(stamp, wanted)


def _point_at(project: Path, root: Path) -> None:
    """Put a folder that holds the installed package, metadata and all, on an environment's path.

    There is nothing to build: its dependencies are part of every lock.
    """
    (site_packages,) = (root / "lib").glob("python*/site-packages")
    write_whole(site_packages / "trlcompat.pth", f"{project}\n")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
