"""uv as a child process: found, given pip's settings, its refusals turned into one reason.

Imports only the standard library. Neither a host nor a path is known here: wheel folders and indexes come from pip's
own configuration.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_trlcompat.matrix.errors import DiskFull, MatrixError, Unreachable, Untestable
from pytest_trlcompat.matrix.files import disk_is_full

__all__ = ["find_uv", "settings", "torch_backend", "uv", "uv_cached_first", "uv_network_first", "uv_would_install"]

_FROM_PIP = {"find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX"}
_DISK_FULL = f"(os error {errno.ENOSPC})"
# uv draws a tree: multiplication sign, box drawing, triangle.
_ORNAMENT = re.compile(r"^(?:error:|cause:|[\u00d7\u2500-\u257f\u25b6\s]+)\s*")
_NETWORK = re.compile(r"failed to fetch|connect|dns error|timed out|network|tls|error sending request", re.IGNORECASE)


def find_uv() -> str:
    """The uv of this interpreter's environment, or the one on PATH.

    Raises:
        MatrixError: when there is none.
    """
    try:
        from uv import find_uv_bin

        return os.fsdecode(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if found is None:
        raise MatrixError(
            f"uv was not found, neither installed beside {sys.executable} nor on PATH; install it with: pip install uv"
        )
    return found


def uv(arguments: Sequence[str], *, stdin: str | None = None, offline: bool = False, index_alone: bool = False) -> str:
    """Run uv and return what it printed.

    Args:
        index_alone: without wheel folders, and with the index's own builds of torch.

    Raises:
        Untestable: with uv's own reason when it refuses.
        DiskFull: which is no cell's fault.
    """
    return _run(arguments, stdin, offline, index_alone).stdout


def uv_would_install(arguments: Sequence[str]) -> str | None:
    """What ``uv pip install`` would install from the cache alone, as it says so; ``None`` where it would download.

    Args:
        arguments: without ``--quiet``.
    """
    try:
        said = _run([*arguments, "--dry-run"], None, offline=True, index_alone=False).stderr
    except Untestable:
        return None
    return None if "Would download" in said else said


def _run(
    arguments: Sequence[str], stdin: str | None, offline: bool, index_alone: bool
) -> subprocess.CompletedProcess[str]:
    command = [find_uv(), *arguments, *(["--offline"] if offline else [])]
    child = settings(os.environ)
    if index_alone:
        child = {name: value for name, value in child.items() if name not in ("UV_FIND_LINKS", "UV_TORCH_BACKEND")}
    done = subprocess.run(command, input=stdin, env=child, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if _DISK_FULL in done.stderr:
            raise DiskFull(disk_is_full(" (while uv wrote to it)"))
        raise Untestable(_reason(done.stderr) or f"uv ended with exit status {done.returncode}: {shlex.join(command)}")
    return done


def uv_cached_first(arguments: Sequence[str]) -> str:
    """Run uv from its cache alone, and over the network only where the cache does not do.

    For exact versions, where what is cached cannot be outdated: nothing is asked of the registry again, and a machine
    without network works as long as the cache is full.
    """
    try:
        return uv(arguments, offline=True)
    except Untestable as from_cache:
        try:
            return uv(arguments)
        except Untestable as error:
            if _NETWORK.search(str(error)):
                raise Unreachable(f"{error}\nand without the network: {from_cache}") from error
            raise


def uv_network_first(arguments: Sequence[str], *, stdin: str | None = None, index_alone: bool = False) -> str:
    """Run uv over the network, and from its cache alone where there is no network.

    For resolving, where the registry may know more than the cache. For ``index_alone`` see :func:`uv`.
    """
    try:
        return uv(arguments, stdin=stdin, index_alone=index_alone)
    except Untestable as error:
        if not _NETWORK.search(str(error)):
            raise
        try:
            return uv(arguments, stdin=stdin, offline=True, index_alone=index_alone)
        except Untestable as from_cache:
            raise Unreachable(f"{error}\nand without the network: {from_cache}") from error


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a uv child: the one given, with pip's wheel folders and index handed on.

    What is set for uv itself wins.
    """
    child = {name: value for name, value in environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    for option, variable in _FROM_PIP.items():
        value = environ.get("PIP_" + option.upper().replace("-", "_")) or _pip_config().get(option)
        if value:
            # pip separates by white space, uv by commas.
            child.setdefault(variable, ",".join(value.split()))
    child.setdefault("UV_NO_PROGRESS", "1")
    # DeepSpeed's setup compiles nothing with it; its operators are built when they are used.
    child.setdefault("DS_BUILD_OPS", "0")
    child["NO_COLOR"] = "1"
    return child


def torch_backend(environ: Mapping[str, str]) -> list[str]:
    """Options that choose a CPU build of torch, empty where a wheel folder or the user has chosen already."""
    if environ.get("UV_TORCH_BACKEND"):
        return []
    links = settings(environ).get("UV_FIND_LINKS", "")
    if any(_may_hold_torch(link) for link in links.split(",") if link):
        return []
    return ["--torch-backend", "cpu"]


def _may_hold_torch(link: str) -> bool:
    if "://" in link and not link.startswith("file://"):
        return True
    return any(Path(link.removeprefix("file://")).glob("torch-*.whl"))


@functools.cache
def _pip_config() -> dict[str, str]:
    """What pip's configuration files say, by option; empty where this interpreter has no pip."""
    command = [sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        # For example: global.find-links='/wheels'
        match = re.fullmatch(r"(?:global|install)\.([a-z-]+)=(.*)", line.strip())
        if match:
            found[match[1]] = " ".join(shlex.split(match[2]))
    return found


def _reason(stderr: str) -> str:
    """uv's message without its ornaments, the first lines of it."""
    lines = [_ORNAMENT.sub("", line.strip()) for line in stderr.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("warning:", "DEBUG", "Using ", "Resolved "))]
    return "\n".join(kept[:30])
