"""Runs uv as a child process, with pip's settings, and reports its errors.

No host and no path is fixed here: wheel folders and indexes come from pip's own configuration.
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
from types import MappingProxyType

from pytest_trlcompat.matrix.errors import DiskFull, MatrixError, Unreachable, Untestable
from pytest_trlcompat.matrix.files import disk_is_full

__all__ = [
    "BUILT_FROM_SOURCE",
    "WHEELS_ONLY",
    "find_uv",
    "settings",
    "torch_backend",
    "uv",
    "uv_cached_first",
    "uv_network_first",
    "uv_would_install",
]

BUILT_FROM_SOURCE = ("axolotl-contribs-lgpl", "axolotl-contribs-mit", "cellpylib", "deepspeed", "pycosat", "zss")
"""The packages of the index that may be built, since they have no wheel: building runs code of the package's own."""

WHEELS_ONLY = ("--only-binary", ":all:", *(word for name in BUILT_FROM_SOURCE for word in ("--no-binary", name)))
"""Options of uv by which it builds nothing else, neither to install it nor to learn what it requires."""

_FROM_PIP = {"find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX"}
_LINES = 30
# How Rust prints an error of the operating system; uv's exit status does not tell it apart.
_DISK_FULL = f"(os error {errno.ENOSPC})"
# uv draws a tree: multiplication sign, box drawing, triangle.
_ORNAMENT = re.compile(r"^(?:error:|cause:|[\u00d7\u2500-\u257f\u25b6\s]+)\s*")
# uv has no exit status of its own for a network that is not there.
_NETWORK = re.compile(r"failed to fetch|connect|dns error|timed out|network|tls|error sending request", re.IGNORECASE)


def find_uv() -> str:
    """The uv of this interpreter's environment, or the one on PATH.

    Raises:
        MatrixError: when there is no uv.
    """
    try:
        from uv import find_uv_bin

        return os.fsdecode(find_uv_bin())
    except (ImportError, FileNotFoundError):
        path = shutil.which("uv")
    if path is None:
        raise MatrixError(f"uv is neither installed for {sys.executable} nor on PATH; install it with: pip install uv")
    return path


def uv(
    arguments: Sequence[str],
    *,
    stdin: str | None = None,
    offline: bool = False,
    index_alone: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run uv and return what it printed.

    Args:
        variables: further ones of its environment.
        index_alone: ignore wheel folders, and use the index's own builds of torch.

    Raises:
        Untestable: when uv fails, with its reason.
        DiskFull: when the disk is full.
    """
    return _run(arguments, stdin, offline, index_alone, variables).stdout


def uv_would_install(arguments: Sequence[str]) -> str | None:
    """The output of ``uv pip install --dry-run`` if the cache has everything; ``None`` if uv would download.

    Args:
        arguments: without ``--quiet``.
    """
    try:
        # uv tells people on standard error what it would do.
        output = _run([*arguments, "--dry-run"], None, offline=True, index_alone=False).stderr
    # Without the network it is an error that the cache lacks something.
    except Untestable:
        return None
    return None if "Would download" in output else output


def _run(
    arguments: Sequence[str],
    stdin: str | None,
    offline: bool,
    index_alone: bool,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    command = [find_uv(), *arguments, *(["--offline"] if offline else [])]
    child = {**settings(os.environ), **variables}
    if index_alone:
        child = {name: value for name, value in child.items() if name not in ("UV_FIND_LINKS", "UV_TORCH_BACKEND")}
    done = subprocess.run(command, input=stdin, env=child, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if _DISK_FULL in done.stderr:
            raise DiskFull(disk_is_full(" (while uv wrote to it)"))
        raise Untestable(_reason(done.stderr) or f"uv ended with exit status {done.returncode}: {shlex.join(command)}")
    return done


def uv_cached_first(
    arguments: Sequence[str], *, stdin: str | None = None, variables: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Run uv offline from its cache, and with the network only if that fails.

    For exact versions, of which a cached copy cannot be outdated: the index is not queried again, and a machine without
    a network works as long as the cache has them.
    """
    try:
        return uv(arguments, stdin=stdin, offline=True, variables=variables)
    except Untestable as from_cache:
        try:
            return uv(arguments, stdin=stdin, variables=variables)
        except Untestable as error:
            if _NETWORK.search(str(error)):
                raise Unreachable(f"{error}\nand without the network: {from_cache}") from error
            raise


def uv_network_first(arguments: Sequence[str], *, stdin: str | None = None, index_alone: bool = False) -> str:
    """Run uv with the network, and offline from its cache if there is no network.

    For resolving, since the index may have newer releases than the cache. For ``index_alone`` see :func:`uv`.
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
    """The environment variables of a uv process: ``environ`` with pip's wheel folders and index.

    Settings of uv itself take precedence.
    """
    child = {name: value for name, value in environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    for option, variable in _FROM_PIP.items():
        value = environ.get("PIP_" + option.upper().replace("-", "_")) or _pip_config().get(option)
        if value:
            # pip separates by white space, uv by commas.
            child.setdefault(variable, ",".join(value.split()))
    child.setdefault("UV_NO_PROGRESS", "1")
    # DeepSpeed's setup then compiles nothing; its operators are built when they are used.
    child.setdefault("DS_BUILD_OPS", "0")
    child["NO_COLOR"] = "1"
    return child


def torch_backend(environ: Mapping[str, str]) -> list[str]:
    """Options that select a CPU build of torch; empty if a wheel folder or the user has selected one."""
    if environ.get("UV_TORCH_BACKEND"):
        return []
    links = settings(environ).get("UV_FIND_LINKS", "")
    if any(_may_hold_torch(link) for link in links.split(",") if link):
        return []
    return ["--torch-backend", "cpu"]


def _may_hold_torch(link: str) -> bool:
    # What a page on the network links to is not known without asking it.
    if "://" in link and not link.startswith("file://"):
        return True
    return any(Path(link.removeprefix("file://")).glob("torch-*.whl"))


@functools.cache
def _pip_config() -> dict[str, str]:
    """The options in pip's configuration files; empty if this interpreter has no pip."""
    command = [sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    options: dict[str, str] = {}
    for line in done.stdout.splitlines():
        # For example: global.find-links='/wheels'
        match = re.fullmatch(r"(?:global|install)\.([a-z-]+)=(.*)", line.strip())
        if match:
            options[match[1]] = " ".join(shlex.split(match[2]))
    return options


def _reason(stderr: str) -> str:
    """The first lines of uv's message, and the last of a long one, which say why; without its decoration."""
    lines = [_ORNAMENT.sub("", line.strip()) for line in stderr.splitlines()]
    reason = [line for line in lines if line and not line.startswith(("warning:", "DEBUG", "Using ", "Resolved "))]
    if len(reason) > _LINES:
        reason = [*reason[: _LINES // 2], "...", *reason[-_LINES // 2 :]]
    return "\n".join(reason)
