"""A node's folder of environments, and what it needs to run cells: nothing but a Python, a compiler and an index.

The folder is that of ``TRLCOMPAT_NODE_CACHE``, set where ``ray start`` was called, else the one of ``--node-cache``,
else ``~/.cache/pytest-trlcompat/nodes``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat._trust import UntrustedError, make_folder
from pytest_trlcompat.matrix.engines.messages import NodeReport, NodeTask
from pytest_trlcompat.matrix.engines.payload import digest
from pytest_trlcompat.matrix.environments import built
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import in_use, locked, unless_in_use
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.suite_run import OF_THE_MACHINE

__all__ = [
    "NODE_CACHE",
    "NodeLayout",
    "check_files",
    "checked_cache",
    "interpreter",
    "node_cache",
    "report",
    "run_folder",
    "variables",
]

NODE_CACHE = "TRLCOMPAT_NODE_CACHE"
"""The variable that names a node's folder."""

PROJECT = Path(__file__).resolve().parents[3]
"""The files of this project, as the driver has sent them."""

_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class NodeLayout(Layout):
    """The files of a node. ``root`` has this project's, which differ from driver to driver.

    Attributes:
        cache: the node's folder.
        run: the results of one run of one cell.
    """

    cache: Path
    run: Path

    @property
    def environments(self) -> Path:
        return self.cache / "envs"

    @property
    def editable(self) -> bool:
        return False

    @property
    def results(self) -> Path:
        return self.run

    @property
    def resolved_hashes(self) -> Path:
        return self.cache / "hashes"

    @property
    def used_locks(self) -> Path:
        """The locks of the node's environments, those used last written last."""
        return self.cache / "locks"


def node_cache(requested: str | None) -> Path:
    """This node's folder.

    Args:
        requested: the folder of nodes that do not name their own.
    """
    named = os.environ.get(NODE_CACHE) or requested
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-trlcompat" / "nodes"


def checked_cache(requested: str | None, *, of_its_own: bool = True) -> Path:
    """This node's folder, made if it is missing; what is installed there is run for every command that comes.

    Args:
        of_its_own: not the checkout's, which is as safe as the checkout, and is not looked at.

    Raises:
        MatrixError: another user could change what is in it.
    """
    cache = Path(os.path.realpath(node_cache(requested)))
    if not of_its_own:
        cache.mkdir(parents=True, exist_ok=True)
        return cache
    try:
        make_folder(cache)
    except UntrustedError as error:
        raise MatrixError(
            f"{error}, so another user could change what cells run in {cache}; let {NODE_CACHE}, or --node-cache, name "
            "a folder that, with all above it, only this user and root can write to"
        ) from error
    return cache


def report(
    node: str, requested: str | None, requirements: Sequence[str], files: str | None, *, of_its_own: bool = True
) -> NodeReport:
    """What this node is and has; what runs cells is installed, if it is missing.

    Args:
        files: see :func:`check_files`.
        of_its_own: see :func:`checked_cache`.
    """
    cache = Path(os.path.realpath(node_cache(requested)))
    blank = NodeReport(node, socket.gethostname(), str(cache))
    problem = None
    try:
        check_files(files)
        checked_cache(requested, of_its_own=of_its_own)
        interpreter(cache, requirements)
        if not (os.environ.get("CXX") or any(map(shutil.which, _COMPILERS))):
            problem = "there is no C++ compiler; install one, such as g++"
    except (MatrixError, OSError) as error:
        # Told and not raised, since other nodes may be able to run cells.
        problem = str(error)
    environments = built(NodeLayout(PROJECT, cache, cache))
    return NodeReport(blank.node, blank.host, blank.cache, tuple(environments), problem)


def check_files(expected: str | None) -> None:
    """
    Args:
        expected: the digest of the driver's files; ``None``: no matter which.

    Raises:
        MatrixError: this process has imported others, such as those of an installation on this node.
    """
    if expected is not None and expected != _files():
        raise MatrixError(
            f"this project's files in {PROJECT} are not those of the command, which have not arrived here whole; run "
            "the same command again"
        )


@functools.cache
def _files() -> str:
    return digest(Layout(PROJECT))


def interpreter(cache: Path, requirements: Sequence[str]) -> Path:
    """A Python that can run a cell: this one, if it has uv and the rest; else one of a virtual environment, made once.

    Args:
        requirements: of what runs a cell.

    Raises:
        MatrixError: the environment cannot be made.
    """
    needed = ("uv", "packaging", *(("tomli",) if sys.version_info < (3, 11) else ()))
    if all(map(importlib.util.find_spec, needed)):
        return Path(sys.executable)
    key = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:12]
    root = cache / f"runner-{key}"
    python = root / "bin" / "python"
    with locked(root.with_suffix(".lock")):
        if not (root / "complete").is_file():
            shutil.rmtree(root, ignore_errors=True)
            for command in (
                [sys.executable, "-m", "venv", str(root)],
                # Wheels alone: building runs code of the package's own.
                [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *requirements],
            ):
                done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
                if done.returncode != 0:
                    lines = (done.stderr or done.stdout).strip().splitlines()
                    raise MatrixError(
                        f"{' '.join(command[1:5])} failed, which installs what runs a cell: {' '.join(lines[-3:])}"
                    )
            # Written last: without it the next call removes what an interrupted pip has left.
            (root / "complete").touch()
    return python


def variables(task: NodeTask, cache: Path) -> dict[str, str]:
    """The environment variables of a program: this node's, without those of Ray and of Python, and with the
    driver's settings in place of its own."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "PYTHON", "TRLCOMPAT_")) or name in ("TRLCOMPAT_CACHE",)
    }
    if "OMP_NUM_THREADS" not in _at_the_start():
        inherited.pop("OMP_NUM_THREADS", None)  # Ray sets it in its workers, nox does not
    if task.own_caches:
        inherited.setdefault("UV_CACHE_DIR", str(cache / "uv"))
        inherited.setdefault("TRLCOMPAT_CACHE", str(cache / "compiled"))
    settings = {name: value for name, value in task.variables.items() if name not in OF_THE_MACHINE}
    return {**inherited, **settings, "PYTHONPATH": str(PROJECT)}


@functools.cache
def _at_the_start() -> Mapping[str, str]:
    """The variables with which this process was started."""
    # Not os.environ, in which Ray has set variables since; the kernel keeps what the process began with.
    with open("/proc/self/environ", "rb") as file:
        entries = file.read().split(b"\0")
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if entry)


@contextlib.contextmanager
def run_folder(cache: Path) -> Iterator[Path]:
    """A folder for one run of a cell, which is removed at the end, as are those that killed runs have left."""
    runs = cache / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    for mark in runs.glob("*.used"):
        with unless_in_use(mark) as free:
            if free:
                shutil.rmtree(mark.with_suffix(""), ignore_errors=True)
                mark.unlink(missing_ok=True)
    folder = runs / uuid.uuid4().hex
    # Marked before it exists: what has no mark in use is taken for a killed run's, and removed.
    with in_use(folder.with_suffix(".used")):
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_suffix(".used").unlink(missing_ok=True)
