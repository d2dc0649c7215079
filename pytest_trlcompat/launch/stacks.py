"""Reads the stacks that a rank printed when the launcher requested them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

__all__ = ["Frame", "innermost_frame", "last_stack"]

_HEADER = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_FOREIGN = ("site-packages", "dist-packages")
_OURS = ("pytest_trlcompat", "launch")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it belongs neither to an installed package, nor to Python, nor to the launcher."""
        parts = PurePath(self.file).parts
        ours = any(parts[index : index + 2] == _OURS for index in range(len(parts)))
        installed = any(part in _FOREIGN for part in parts) or any(part.startswith("python3.") for part in parts)
        # Files of code that has none: <string>, <frozen importlib._bootstrap>.
        return not (ours or installed or self.file.startswith("<"))

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(PurePath(self.file).parts[-2:])}:{self.line})"


def last_stack(text: str) -> list[Frame]:
    """The frames, innermost first, of the thread that was running when the last dump in ``text`` was printed.

    ``text`` is the output of :mod:`faulthandler`, among other output. Empty if there is no dump.
    """
    stacks: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        header, frame = _HEADER.match(line), _FRAME.match(line)
        if header:
            stacks.append((header[1] == "Current thread", []))
        elif frame and stacks:
            stacks[-1][1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    current = [frames for is_current, frames in stacks if is_current]
    every = [frames for _, frames in stacks]
    return (current or every or [[]])[-1]


def innermost_frame(text: str) -> str | None:
    """``all_reduce (distributed/distributed_c10d.py:3245), called from train (test_x.py:12)``; ``None`` if unknown."""
    frames = last_stack(text)
    if not frames:
        return None
    users = next((frame for frame in frames if frame.is_users), None)
    if users is None or users == frames[0]:
        return str(frames[0])
    return f"{frames[0]}, called from {users}"
