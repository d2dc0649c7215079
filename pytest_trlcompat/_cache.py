"""Cache of texts that are computed from a checkout's own files: in the user's cache folder, never in the checkout.

A wheel contains the same texts as files, which its build writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_trlcompat import _data, _json_files, _trust

__all__ = ["files", "read", "stamp", "write"]


def files(folder: Path, end: str) -> Iterator[str]:
    """The paths of files whose names have an ending, in a folder and in those in it."""
    for entry in os.scandir(folder):
        if entry.name.endswith(end):
            yield entry.path
        elif entry.is_dir():
            yield from (inner.path for inner in os.scandir(entry.path) if inner.name.endswith(end))


def stamp(paths: Iterable[str], present: Iterable[str] = ()) -> str:
    """A digest that changes when one of the files may have changed; the files are not read.

    Args:
        present: files of which only the paths count, so that they are not looked at.
    """
    digest = hashlib.sha256("\n".join(sorted(present)).encode())
    for path in sorted(paths):
        status = os.stat(path)
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def read(folder: Path, kind: str = "") -> str | None:
    """The text that :func:`write` wrote; ``None`` where there is none, or another user could have written it.

    Args:
        folder: of the files from which the text is computed.
        kind: tells several texts from the same files apart.
    """
    try:
        path = _path(folder, kind)
        _trust.check_folder(path.parent)
        _trust.check_files(path.parent, [path.name])
        return _json_files.read_text(path)
    # RuntimeError: the user has no home directory.
    except (OSError, RuntimeError, _trust.UntrustedError, _json_files.Unreadable):
        return None


def write(folder: Path, text: str, kind: str = "") -> None:
    """Keep a text for later processes, in place of the last one, where nobody else can write to the folder."""
    # Without a place for it the text is computed each time.
    with contextlib.suppress(OSError, RuntimeError, _trust.UntrustedError):
        path = _path(folder, kind)
        _trust.make_folder(path.parent)
        import tempfile  # pytest loads this module at every start

        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _path(folder: Path, kind: str) -> Path:
    """The path of the text; a checkout has one of each kind."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    return _data.cache_folder() / "catalog" / f"{name}{kind and f'-{kind}'}.json"
