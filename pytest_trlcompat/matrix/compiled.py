"""Shares compiled modules (``*.pyc``) between environments that contain the same source file.

uv gives environments hard links to one copy of a source file, but Python would compile it in each environment again.
Here the compiled module is a hard link as well. At each import Python compares the source's time and size with those
recorded in the compiled module, and replaces it if they differ, so a wrong link costs only time:
https://peps.python.org/pep-3147/.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["adopt", "drop_unused", "share"]

_AT_ONCE = 32
"""Folders or files that are handled at the same time, to hide the latency of the disk."""

_COMPILED = re.compile(r"(?P<module>.+)\.(?P<tag>cpython-\d+)\.pyc")
"""Excludes modules of ``python -O``, and pytest's, whose assertions are rewritten."""
_HEADER = struct.Struct("<4sIII")
"""Magic number, flags, and the source's time (seconds) and size (bytes), each modulo 2**32."""

_Folder = tuple[str, list[str]]
"""The path of a folder, and the names of its files."""


def share(root: Path, store: Path) -> int:
    """Link the compiled modules below ``root`` into ``store``, or replace them by those that are there already.

    Only modules whose source is a hard link itself, and only on one file system.

    Returns:
        How many compiled modules became shared.
    """
    store.mkdir(parents=True, exist_ok=True)
    caches = [folder for folder in _walk(root) if os.path.basename(folder[0]) == "__pycache__"]
    with ThreadPoolExecutor(_AT_ONCE) as linkers:
        return sum(linkers.map(functools.partial(_share, store), caches))


def adopt(root: Path, store: Path) -> int:
    """Link into ``root`` the compiled modules that ``store`` has of its sources.

    Args:
        root: holds one folder for each version of Python, such as ``python3.11``.

    Returns:
        How many compiled modules became shared.
    """
    adopted = 0
    for python in root.glob("python*"):
        tag = "cpython-" + python.name.removeprefix("python").replace(".", "")
        with ThreadPoolExecutor(_AT_ONCE) as linkers:
            adopted += sum(linkers.map(functools.partial(_adopt, tag, store), _walk(python)))
    return adopted


def drop_unused(store: Path) -> int:
    """Remove compiled modules that no environment uses any more.

    Returns:
        How many compiled modules were removed.
    """
    unused = [entry.path for entry in os.scandir(store) if entry.stat().st_nlink == 1] if store.is_dir() else []
    for path in unused:
        os.unlink(path)
    return len(unused)


def _share(store: Path, cache: _Folder) -> int:
    folder, names = cache
    shared = 0
    for match in filter(None, map(_COMPILED.fullmatch, names)):
        # It was removed meanwhile, or cannot be linked.
        with contextlib.suppress(OSError):
            compiled = f"{folder}/{match[0]}"
            source = os.stat(f"{os.path.dirname(folder)}/{match['module']}.py", follow_symlinks=False)
            # A source with one link is of this environment alone, and a compiled module with several is shared already.
            if source.st_nlink == 1 or os.stat(compiled, follow_symlinks=False).st_nlink > 1:
                continue
            shared_file = store / _key(source, match["tag"])
            if shared_file.exists():
                _replace(shared_file, compiled)
            elif _is_of(compiled, source):
                os.link(compiled, shared_file)
            else:
                continue
            shared += 1
    return shared


def _adopt(tag: str, store: Path, sources: _Folder) -> int:
    folder, names = sources
    adopted = 0
    for name in names:
        module, extension = os.path.splitext(name)
        if extension != ".py":
            continue
        with contextlib.suppress(OSError):  # it is there already
            source = os.stat(f"{folder}/{name}", follow_symlinks=False)
            if source.st_nlink > 1 and (shared_file := store / _key(source, tag)).exists():
                os.makedirs(f"{folder}/__pycache__", exist_ok=True)
                os.link(shared_file, f"{folder}/__pycache__/{module}.{tag}.pyc")
                adopted += 1
    return adopted


def _key(source: os.stat_result, tag: str) -> str:
    """A file's inode, time and size; uv sets the time when it unpacks the file, in nanoseconds."""
    return f"{source.st_ino}-{source.st_mtime_ns}-{source.st_size}.{tag}.pyc"


def _is_of(compiled: str, source: os.stat_result) -> bool:
    """Whether Python would accept this compiled module for this source."""
    with open(compiled, "rb", buffering=0) as file:
        header = file.read(_HEADER.size)
    if len(header) != _HEADER.size:
        return False
    _, flags, seconds, size = _HEADER.unpack(header)
    # Other flags mark a module that Python compares by a hash of the source, or not at all (PEP 552).
    return (flags, seconds, size) == (0, int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)


def _replace(shared_file: Path, compiled: str) -> None:
    """Put a shared module in the place of an environment's own."""
    temporary = f"{compiled}.{os.getpid()}"
    os.link(shared_file, temporary)
    try:
        # Atomically, since another process may be importing it.
        os.replace(temporary, compiled)
    finally:
        # It is gone where os.replace has moved it.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _walk(root: Path) -> Iterator[_Folder]:
    """Every folder below ``root``; those that cannot be read are empty."""
    level = [str(root)]
    with ThreadPoolExecutor(_AT_ONCE) as readers:
        while level:
            below = []
            for folder, (names, folders) in zip(level, readers.map(_list, level), strict=True):
                yield folder, names
                below += folders
            level = below


def _list(folder: str) -> tuple[list[str], list[str]]:
    """Names of the files, and paths of the folders, in a folder."""
    names: list[str] = []
    folders: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                names.append(entry.name)
    return names, folders
