"""Virtual environments that contain the packages of a lock, built once by uv and shared by all sessions."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from packaging.version import Version

from pytest_trlcompat.inference import recording_engine, torchvision_ops
from pytest_trlcompat.matrix import commit_wheels, compiled, installed, torch_builds
from pytest_trlcompat.matrix.errors import DiskFull, MatrixError, Untestable
from pytest_trlcompat.matrix.files import explained_os_errors, in_use, locked, unless_in_use, write_whole
from pytest_trlcompat.matrix.hashes import with_hashes
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.uv import BUILT_FROM_SOURCE, WHEELS_ONLY, uv, uv_cached_first

__all__ = [
    "Environment",
    "built",
    "drop_unused",
    "ensure",
    "ensure_tools",
    "existing",
    "install_hashed",
    "name_of",
    "prune",
    "remove",
    "reserved",
]

_FORMAT = "1"
"""Part of every environment's key; change it when environments are built differently."""

_STAMP = "trlcompat-built.json"
_DIGEST_LENGTH = 12
_ANY_DIGEST = "[0-9a-f]" * _DIGEST_LENGTH
_COMPILED = "compiled"
"""The folder, among the environments, of the compiled modules that they share."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that is ready to use.

    Attributes:
        project: the folder that its processes import this project from. Several checkouts, and several drivers of Ray,
            share an environment, so this is never what somebody wrote into it last.
    """

    root: Path
    project: Path | None = None

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its processes: its own programs first on the path, and its own folder for compiled
        extensions."""
        return {
            "VIRTUAL_ENV": str(self.root),
            "PATH": os.pathsep.join([str(self.root / "bin"), os.environ.get("PATH", os.defpath)]),
            # An operator that was built for one DeepSpeed must not be loaded by another.
            "TORCH_EXTENSIONS_DIR": str(self.root / "torch_extensions"),
            "PYTHONNOUSERSITE": "1",
            **({} if self.project is None else {"PYTHONPATH": str(self.project)}),
        }

    def used(self) -> contextlib.AbstractContextManager[None]:
        """Prevent its removal within the block."""
        return in_use(_users(self.root))

    def share_modules(self) -> None:
        """Share its compiled modules with the other environments."""
        compiled.share(self._modules, self.root.parent / _COMPILED)

    def adopt_modules(self) -> None:
        """Use the modules that other environments have compiled from the same sources."""
        compiled.adopt(self._modules, self.root.parent / _COMPILED)

    @property
    def _modules(self) -> Path:
        return self.root / "lib"


def ensure(lock: Lock, layout: Layout, say: Say = print) -> Environment:
    """The environment of a lock, with this project as its layout says; built if it does not exist.

    If the available build of torch is a CUDA build, its CUDA libraries are installed as well.

    Raises:
        Untestable: when it cannot be built, with uv's reason.
        DiskFull: when the disk is full; the unfinished environment is removed.
        MatrixError: for another error of the operating system, or when the environment holds other packages than its
            lock names, which somebody has then installed or removed there.
    """
    root = _root(lock, layout)

    def fill(python: str) -> None:
        _fill(lock, layout, python, say)
        Environment(root).adopt_modules()

    with (
        explained_os_errors(),
        locked(root.with_suffix(".lock"), lambda: say(f"{root.name}: another process is building it")),
    ):
        _build(root, lock.python, fill, lambda: say(f"{lock.cell_id}: building its environment {root.name}"))
        if layout.editable:
            _install_project(root, layout)
        if (version := lock.packages.get(recording_engine.DISTRIBUTION)) is not None:
            recording_engine.install(version, _site_packages(root))
        if torchvision_ops.DISTRIBUTION in lock.packages:
            torchvision_ops.install(_site_packages(root))
        _check(root, lock, say)
    return Environment(root, layout.root)


def _fill(lock: Lock, layout: Layout, python: str, say: Say) -> None:
    """Install the packages of a lock into an empty environment, each from a file whose hash is known."""
    if "torch" in lock.packages:
        # First, and apart from the rest: its build depends on the machine, and setup programs below import it.
        torch_builds.install(lock.packages["torch"], lock.python, Path(python), layout, say)
    commits = [line for line in lock.releases if commit_wheels.COMMIT.fullmatch(line)]
    others = [line for line in lock.releases if line not in commits and not line.startswith("torch==")]
    built = [line for line in others if line.partition("==")[0] in BUILT_FROM_SOURCE]
    install_hashed([line for line in others if line not in built], lock.python, python, layout)
    if built:
        # Last and without isolation: their setup imports torch and setuptools of this very environment.
        variables = _build_variables(lock)
        install_hashed(built, lock.python, python, layout, "--no-build-isolation", variables=variables)
    if commits:
        wheels = [str(commit_wheels.wheel_of(line, layout)) for line in commits]
        uv(["pip", "install", "--quiet", "--no-deps", "--python", python, *wheels], offline=True)


def _check(root: Path, lock: Lock, say: Say) -> None:
    """Compare an environment with its lock, each time before it is used: it is shared, and anybody can change it."""
    account = installed.account_of(root, lock.packages)
    if not account.is_complete:
        raise MatrixError(
            f"{root} is not what the lock of {lock.cell_id} names: {account.shortfall()}. Nothing was measured with "
            "it; `nox -s clean` removes it, and the next run builds it anew"
        )
    for line in installed.additions(root, lock.packages):
        say(f"{lock.cell_id}: {line}")


def reserved(lock: Lock, layout: Layout) -> contextlib.AbstractContextManager[None]:
    """Prevent the removal of a lock's environment within the block, also before it has been built."""
    return in_use(_users(_root(lock, layout)))


def _build_variables(lock: Lock) -> dict[str, str]:
    """What a build needs with the lock's setuptools."""
    # 77.0.3, which vLLM pins for CPUs, loads distutils' commands before it puts its own ``Command`` there, so that
    # torch's ``BuildExtension.with_options`` ends with ``Command.__init__() got an unexpected keyword argument
    # 'use_ninja'``; not with the standard library's distutils, which Python has up to 3.11.
    old = lock.packages.get("setuptools") == "77.0.3" and Version(lock.python) < Version("3.12")
    return {"SETUPTOOLS_USE_DISTUTILS": "stdlib"} if old else {}


def install_hashed(
    requirements: Sequence[str],
    python: str,
    interpreter: str,
    layout: Layout,
    *options: str,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Install releases, ``name==version``, each from a file whose hash is known.

    Args:
        python: as uv understands it, whose files are meant.
        interpreter: whose environment they are installed into.
        options: further ones of ``uv pip install``.
        variables: further ones of uv's environment.

    Raises:
        Untestable: when a file has another hash, is missing or cannot be built, with uv's reason.
    """
    command = ["pip", "install", "--quiet", "--no-deps", "--python", interpreter, *WHEELS_ONLY, *options]
    lines = with_hashes(requirements, python, layout)
    uv_cached_first([*command, "--require-hashes", "-r", "-"], stdin="\n".join(lines), variables=variables)


def existing(lock: Lock, layout: Layout) -> Environment | None:
    """The environment of a lock, if it has been built."""
    root = _root(lock, layout)
    return Environment(root, layout.root) if _is_complete(root) else None


def name_of(lock: Lock, layout: Layout) -> str:
    """The name of a lock's environment, which is the same on every machine."""
    return _root(lock, layout).name


def built(layout: Layout) -> list[str]:
    """The names of the cells' environments that have been built."""
    return sorted(path.name for path in layout.environments.glob("cell-*") if _is_complete(path))


def ensure_tools(lock: Lock, layout: Layout, say: Say = print, *, project: bool = False) -> Environment:
    """The environment of a tool's lock; built if it does not exist.

    Args:
        project: install this project as well, as editable.

    Raises:
        Untestable: when it cannot be built, with uv's reason.
        MatrixError: when it holds other packages than its lock names, which somebody has then installed or removed.
    """
    root = _root(lock, layout)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    # By its path uv needs no network; another version it may have to download.
    interpreter = sys.executable if lock.python == running else lock.python

    def fill(python: str) -> None:
        _fill(lock, layout, python, say)
        # The tool of the summary is built when the interpreter ends, which starts no more threads: it compiles itself.
        with contextlib.suppress(RuntimeError):
            Environment(root).adopt_modules()

    with (
        explained_os_errors(),
        locked(root.with_suffix(".lock"), lambda: say(f"{root.name}: another process is building it")),
    ):
        _build(root, interpreter, fill, lambda: say(f"building {root.name}"))
        if project:
            _install_project(root, layout)
        _check(root, lock, say)
    return Environment(root, layout.root if project else None)


def prune(layout: Layout, used_locks: Iterable[Lock], say: Say = print) -> None:
    """Remove the environments that belong to none of the locks: when a lock changes, so does its environment.

    Tools of which no lock is among these stay. Environments that hold other packages than their lock names are removed,
    too. An environment in use stays. Shared files that only removed environments used are removed too.

    Raises:
        MatrixError: when an environment cannot be removed.
    """
    locks = {_root(lock, layout): lock for lock in used_locks}
    kinds = {lock.kind for lock in locks.values()} - {"cell"}
    patterns = ["cell-*", *(f"{kind}-{_ANY_DIGEST}" for kind in kinds)]  # of two tools one's name may begin another's
    for root in sorted(path for name in patterns for path in layout.environments.glob(name) if path.is_dir()):
        lock = locks.get(root)
        account = None if lock is None else installed.account_of(root, lock.packages)
        if account is None or (_is_complete(root) and not account.is_complete):
            removed = _remove(root, say)
            why = "belongs to no lock" if account is None else f"is not what its lock names ({account.shortfall()})"
            say(f"{root.name}: {why}, {'removed' if removed else 'but is in use'}")
    drop_unused(layout, say)


def remove(lock: Lock, layout: Layout, say: Say = print) -> bool:
    """Remove the environment of a lock; returns whether it existed and was not in use.

    Raises:
        MatrixError: when it cannot be removed.
    """
    root = _root(lock, layout)
    return root.is_dir() and _remove(root, say)


def drop_unused(layout: Layout, say: Say = print, used_locks: Iterable[Lock] = ()) -> None:
    """Remove shared files that no environment uses any more: compiled modules, builds of torch.

    Args:
        used_locks: locks whose builds of torch stay.

    Raises:
        MatrixError: when something cannot be removed.
    """
    with explained_os_errors():
        compiled.drop_unused(layout.environments / _COMPILED)
        needed = {lock.packages["torch"]: lock.python for lock in used_locks if "torch" in lock.packages}
        for name in torch_builds.prune(layout, needed):
            say(f"{name}: no environment uses it, removed")


def _remove(root: Path, say: Say) -> bool:
    waiting = functools.partial(say, f"{root.name}: another process is building it; waiting")
    with explained_os_errors(), locked(root.with_suffix(".lock"), waiting), unless_in_use(_users(root)) as free:
        if free:
            # Its lock files stay, since another process may be waiting for them.
            shutil.rmtree(root)
        return free


def _users(root: Path) -> Path:
    return root.with_suffix(".used")


def _root(lock: Lock, layout: Layout) -> Path:
    return layout.environments / f"{lock.kind}-{_digest(_FORMAT, lock.digest)}"


def _build(root: Path, interpreter: str, fill: Callable[[str], None], starting: Callable[[], None]) -> None:
    """Build an environment, unless it is complete."""
    if _is_complete(root):
        return
    starting()
    shutil.rmtree(root, ignore_errors=True)
    try:
        with explained_os_errors():
            # In its place, because scripts in ``bin`` contain absolute paths.
            uv(["venv", "--quiet", "--python", interpreter, str(root)], offline=Path(interpreter).is_absolute())
            fill(str(root / "bin" / "python"))
            # Last, since it marks the environment as complete.
            write_whole(root / _STAMP, json.dumps({"format": _FORMAT}))
    except DiskFull:
        shutil.rmtree(root, ignore_errors=True)
        raise


def _is_complete(root: Path) -> bool:
    # The interpreter is a link, which leads nowhere once uv's Python has been removed.
    return (root / _STAMP).is_file() and (root / "bin" / "python").exists()


def _install_project(root: Path, layout: Layout) -> None:
    """Install this checkout as editable, and again if its metadata (entry points, dependencies) changed.

    For its metadata and programs, and for people who use the environment by hand: what processes of ours import, their
    ``PYTHONPATH`` says.
    """
    stamp = root / "trlcompat-project.txt"
    try:
        metadata = (layout.root / "pyproject.toml").read_text(encoding="utf-8")
    except FileNotFoundError:
        # Nothing to install: processes of ours find the project on their path.
        return
    digest = _digest(str(layout.root), metadata)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == digest:
        return
    install = ("pip", "install", "--quiet", "--no-deps", "--python", str(root / "bin" / "python"))
    try:
        uv([*install, "--no-build-isolation", "--editable", str(layout.root)], offline=True)
    except Untestable as error:
        raise MatrixError(f"this project itself could not be installed: {error}") from error
    write_whole(stamp, digest)


def _site_packages(root: Path) -> Path:
    (site_packages,) = (root / "lib").glob("python*/site-packages")
    return site_packages


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:_DIGEST_LENGTH]
