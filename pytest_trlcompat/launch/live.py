"""Ranks' output on the test's own output, each line with its rank: while they run, or afterwards."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["file_of", "followed", "prefixed"]

_POLL = 0.05
_STREAMS = ("stdout", "stderr")


def prefixed(text: str, rank: int) -> str:
    """``[rank 1] text`` for each line; of one that a progress bar has written over, what was left in the end."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n") if text)
    return "".join(f"[rank {rank}] {line}\n" for line in lines)


def file_of(folder: str, local_rank: int, stream: str) -> Path:
    """Where a rank's output is written that is followed."""
    return Path(folder) / f"rank{local_rank}.{stream}"


@contextlib.contextmanager
def followed(folder: str, first_rank: int, ranks: int) -> Iterator[None]:
    """Print what ranks write, line by line, until the block ends.

    Args:
        folder: as for :func:`file_of`; the files may appear later.
        first_rank: the global number of this machine's first rank.
        ranks: their number.
    """
    ended = threading.Event()
    files = [
        _Followed(file_of(folder, local, stream), first_rank + local, getattr(sys, stream))
        for local in range(ranks)
        for stream in _STREAMS
    ]

    def follow() -> None:
        while not ended.wait(_POLL):
            for stream_file in files:
                stream_file.print_lines()

    thread = threading.Thread(target=follow, name="trlcompat-output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        # Only when the thread has ended, which reads the same files from the same offsets.
        for stream_file in files:
            stream_file.print_rest()


class _Followed:
    """One file, as far as it was read."""

    def __init__(self, path: Path, rank: int, stream: IO[str]) -> None:
        self._path, self._rank, self._stream = path, rank, stream
        self._offset, self._left = 0, b""

    def print_lines(self) -> None:
        whole, newline, self._left = (self._left + self._read()).rpartition(b"\n")
        self._print(whole + newline)

    def print_rest(self) -> None:
        self._print(self._left + self._read())

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    def _print(self, data: bytes) -> None:
        if data:
            self._stream.write(prefixed(data.decode(errors="replace"), self._rank))
            self._stream.flush()
