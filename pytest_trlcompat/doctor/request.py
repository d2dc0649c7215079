"""From the words of a command line to the stack that they specify."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_trlcompat.doctor.alternatives import Asked, combine
from pytest_trlcompat.doctor.requirements import of_pins
from pytest_trlcompat.doctor.stack_spec import StackSpec, StackSpecError, installed_here
from pytest_trlcompat.stack import PACKAGES

__all__ = ["read_stack_spec"]


def read_stack_spec(
    words: Sequence[str], files: Sequence[str], stdin: Callable[[int], bytes], asked: Asked | None = None
) -> StackSpec:
    """The stack of ``trlcompat doctor [-r FILE ...] [FILE | - | PIN ...]``; pins win over files.

    Args:
        stdin: reads at most so many bytes of standard input.
        asked: to which Python and platform the question is limited.

    Raises:
        StackSpecError: when nothing can be read, or what was read names no package of the stack.
    """
    asked = asked or Asked()
    pins = [word for word in words if word != "-" and not _is_file(word)]
    sources = [*files, *(word for word in words if word == "-" or _is_file(word))]
    mentions = of_pins(pins)
    if not sources:
        if pins:
            return combine(mentions, "the command line", asked, lock=False, complete=False)
        here = installed_here()
        return dataclasses.replace(here, python=asked.python or here.python)
    from pytest_trlcompat.doctor.documents import read_documents  # most questions name pins alone

    spec = read_documents(sources, stdin, asked)
    if not spec.texts and not mentions:
        raise StackSpecError(f"{spec.source}: names none of {', '.join(PACKAGES)}; is this the right list?")
    return spec.with_versions(combine(mentions, "", asked, lock=False, complete=False)) if mentions else spec


def _is_file(word: str) -> bool:
    """Whether a word cannot be a pin, by its form; a file that does not exist gets its own error message later."""
    try:
        exists = Path(word).is_file()
    except (OSError, ValueError):  # no name of a file
        exists = False
    return "=" not in word and (word.endswith((".toml", ".lock", ".txt", ".in")) or "/" in word or exists)
