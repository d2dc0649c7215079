"""Reads tracebacks that are known as text: every exception, its frames, and which exception led to which."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Raised", "exceptions", "led_to", "without_prefixes"]

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_RAISED = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?::(?: (?P<message>.*))?)?$")
_PREFIX = re.compile(r"^(?:\[?rank\s*\d+\]?:|E {1,3}|\|)\s?")
_MESSAGE_LINES = 20
_CHAINED = ("The above exception was the direct cause of", "During handling of the above exception, another")


@dataclass(frozen=True)
class Raised:
    """One exception of a traceback.

    Attributes:
        frames: path and line, outermost first.
        text: ``Type: message``.
        chained: it was raised because of the one before it in the text, or while that one was handled.
    """

    frames: tuple[tuple[str, int], ...]
    text: str
    chained: bool = False

    @property
    def type_name(self) -> str:
        return self.text.partition(":")[0].rpartition(".")[2]


def exceptions(text: str) -> list[Raised]:
    """All the exceptions of a formatted traceback, or of a program's output, in the order of the text."""
    in_order: list[Raised] = []
    frames: list[tuple[str, int]] | None = None
    chained = False
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.strip() == _HEADER:
            frames = []
        elif line.strip().startswith(_CHAINED):
            chained = True
        elif frames is not None:
            frame, raised = _FRAME.match(line), _RAISED.match(line)
            if frame:
                frames.append((frame["path"], int(frame["line"])))
            elif raised:
                headline = f"{raised['type'].rpartition('.')[2]}: {raised['message'] or ''}"
                in_order.append(Raised(tuple(frames), "\n".join([headline, *_rest(lines[number + 1 :])]), chained))
                frames, chained = None, False
    return in_order


def _rest(lines: Iterable[str]) -> Iterator[str]:
    """The further lines of a message."""
    for number, line in enumerate(lines):
        if number >= _MESSAGE_LINES or line.strip() == _HEADER or line.strip().startswith(_CHAINED):
            return
        yield line


def led_to(raised: Sequence[Raised]) -> list[Raised]:
    """The last exception and, before it, those that led to it, in the order of the text."""
    first = len(raised) - 1
    while first > 0 and raised[first].chained:
        first -= 1
    return list(raised[max(first, 0) :])


def without_prefixes(output: str) -> str:
    """A program's output without the prefixes ``[rank0]:`` and ``E``, which torchrun and pytest put before lines."""
    return "\n".join(_PREFIX.sub("", line.rstrip()) for line in output.splitlines())
