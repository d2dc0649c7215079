"""Reading what a person gives to the doctor, and what that includes, within limits.

A file may be a stranger's: it is read whole, at most once, if it is a regular file of a sensible size, and it includes
files only from its own folder or below it. Messages repeat nothing of its text but requirements, since a file that was
named by mistake may hold a secret.
"""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_trlcompat.doctor.stack_spec import StackSpecError

__all__ = ["MOST_BYTES", "Files", "decoded"]

MOST_BYTES = 16 * 2**20
"""Of all that one question reads; the lock of a large project has a tenth of it."""
_MOST_FILES = 100
_DEEPEST = 20
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def decoded(data: bytes, where: str) -> str:
    """Text in the encoding that its byte order mark names, else in UTF-8.

    Raises:
        StackSpecError: it is not text in that encoding.
    """
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise StackSpecError(f"{where}: not text in UTF-8 (at byte {error.start}); save it as UTF-8") from error
    if "\0" in text:
        raise StackSpecError(f"{where}: not text (it holds null bytes); give the output of pip freeze, or a lock")
    return text


@dataclass
class Files:
    """The files of one question.

    Attributes:
        named: those that the command line names: they may be included from anywhere.
        stdin: reads at most so many bytes of standard input.
    """

    stdin: Callable[[int], bytes]
    named: Sequence[str] = ()
    _left: int = MOST_BYTES
    _seen: set[Path] = field(default_factory=set)
    _open: list[Path] = field(default_factory=list)

    def named_file(self, source: str) -> bytes:
        """What the command line names, ``-`` for standard input.

        Raises:
            StackSpecError: it cannot be read.
        """
        if source == "-":
            return self._counted(self.stdin(self._left + 1), "standard input", "")
        return self._bytes(Path(source), source, "")

    def begin(self, file: Path) -> None:
        """A list that is read; see :meth:`end`."""
        self._seen.add(file)
        self._open.append(file)

    def end(self) -> None:
        """The list that was begun last is read."""
        self._open.pop()

    def included(self, path: str, location: str) -> tuple[Path, bytes | None]:
        """A file that the open list includes, and what is in it: ``None`` if it was read before.

        Raises:
            StackSpecError: it cannot be read, or may not.
        """
        try:
            # Resolved before it is judged, since a link may lead out of the folder.
            file = Path(os.path.realpath(self._open[-1].parent / path))
        except ValueError as error:  # a name that no file can have
            raise _unreadable(path, location, "not a path") from error
        if file in self._open:
            through = len(self._open) - self._open.index(file)
            raise StackSpecError(f"{location}: {path} includes itself, through {through} files")
        if file in self._seen:
            return file, None
        if not file.is_relative_to(self._open[0].parent) and file not in map(Path, map(os.path.realpath, self.named)):
            raise StackSpecError(
                f"{location}: {path} is not in the folder of {self._open[0].name} or below it, and is not read unless "
                f"you name it: add -r {path} with its path from here"
            )
        if len(self._open) >= _DEEPEST or len(self._seen) >= _MOST_FILES:
            raise StackSpecError(
                f"{location}: more than {_DEEPEST} files include each other, or more than {_MOST_FILES} are included"
            )
        return file, self._bytes(file, path, location)

    def _bytes(self, file: Path, name: str, location: str) -> bytes:
        try:
            # A pipe without a writer must not be waited for.
            descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise _unreadable(name, location, getattr(error, "strerror", None) or "not a path") from error
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            special = "not a regular file; pipe what it holds to: trlcompat doctor -"
            raise _unreadable(name, location, "Is a directory" if stat.S_ISDIR(mode) else special)
        try:
            with open(descriptor, "rb") as opened:
                # One byte more than may be read shows that there is more.
                return self._counted(opened.read(self._left + 1), name, location)
        except OSError as error:
            raise _unreadable(name, location, error.strerror or "") from error

    def _counted(self, data: bytes, name: str, location: str) -> bytes:
        if len(data) > self._left:
            raise _unreadable(name, location, f"more than {MOST_BYTES // 2**20} MiB in all")
        self._left -= len(data)
        return data


def _unreadable(name: str, location: str, why: str) -> StackSpecError:
    return StackSpecError(f"{f'{location}: ' if location else ''}cannot read {name}: {why}")
