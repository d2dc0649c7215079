"""Where an exception was raised, as one line: the functions of the stack's libraries through which it came.

``torch/nn/functional.py:embedding < transformers/generation/utils.py:generate``: the innermost first, by paths that are
the same in every environment. It tells a known symptom with common words from other errors.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable

from pytest_trlcompat.stack import PACKAGES

__all__ = ["apart", "frames", "of_exception", "of_traceback", "with_location"]

_LIMIT = 16
"""How many of the innermost functions are kept."""
# Parentheses and spaces of a path would end the location where it stands in a text, see _WITH.
_PLAIN = str.maketrans("( )", "<_>")
_BETWEEN = " < "
_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line \d+, in (?P<function>\S+)', re.MULTILINE)
_IN_LIBRARY = re.compile(rf".*/(?P<path>(?:{'|'.join(PACKAGES)})/.+)")
_EVERYWHERE = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py")
"""Files through which every call of a model passes."""
_WITH = re.compile(r" \(in (?P<location>[^()\s]+:[^()\s]+(?: < [^()\s]+)*)\)(?= \[|$)")


def of_exception(error: BaseException) -> str:
    """The location of an exception; empty where it has not been raised yet."""
    return _of((frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__))


def of_traceback(text: str) -> str:
    """The location of the last exception of a formatted traceback; empty where that has no frame."""
    last = text.rpartition("Traceback (most recent call last):")[2]
    return _of((match["path"], match["function"]) for match in _FRAME.finditer(last))


def _of(outermost_first: Iterable[tuple[str, str]]) -> str:
    """The innermost function, of any file, and those around it in the stack's libraries, each once."""
    functions: dict[str, None] = {}
    for number, (path, function) in enumerate([*outermost_first][::-1]):
        inside = _IN_LIBRARY.match(path)
        name = inside["path"] if inside else path.rpartition("/")[2]
        if number == 0 or (inside and not name.endswith(_EVERYWHERE)):
            functions.setdefault(f"{name}:{function}".translate(_PLAIN))
    return _BETWEEN.join(list(functions)[:_LIMIT])


def frames(location: str) -> tuple[str, ...]:
    """The functions of a location, the innermost first."""
    return tuple(location.split(_BETWEEN)) if location else ()


def with_location(text: str, location: str) -> str:
    """An exception's text together with its location; :func:`apart` undoes it."""
    return f"{text} (in {location})" if location else text


def apart(text: str) -> tuple[str, str]:
    """The text of an exception without its location, and the location, empty where there is none."""
    match = _WITH.search(text)
    return (text, "") if match is None else (text[: match.start()] + text[match.end() :], match["location"])
