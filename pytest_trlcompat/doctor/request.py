"""From the words of a command line to the stack that they specify."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_trlcompat.doctor.alternatives import Asked, combine
from pytest_trlcompat.doctor.files import Files, decoded
from pytest_trlcompat.doctor.locks import looks_like_lock, read_lock
from pytest_trlcompat.doctor.requirements import Listing, of_pins, read_listing
from pytest_trlcompat.doctor.stack_spec import StackSpec, StackSpecError, installed_here
from pytest_trlcompat.stack import PACKAGES

__all__ = ["read_stack_spec"]

_REQUIRED_BY_TRL = {"trl", "transformers", "torch", "accelerate", "datasets"}
"""A list of installed packages that has all of these describes a whole environment: what it lacks is not installed."""
_STDIN = "standard input"


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
    reader = Files(stdin, sources)
    if len(sources) == 1:
        spec = _read(sources[0], reader, asked)
    elif any(_is_lock(source) for source in sources):
        raise StackSpecError(f"a lock cannot be combined with other files: {', '.join(sources)}; give one lock alone")
    else:
        texts = {source: decoded(reader.given(source), _where(source)) for source in sources}
        spec = _of_lists(texts, reader, asked)
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


def _is_lock(source: str) -> bool:
    return source.endswith((".toml", ".lock"))


def _read(source: str, files: Files, asked: Asked) -> StackSpec:
    where = _where(source)
    text = decoded(files.given(source), where)
    if _is_lock(source) or looks_like_lock(text):
        return read_lock(text, where, asked)
    return _of_lists({source: text}, files, asked)


def _where(source: str) -> str:
    return _STDIN if source == "-" else source


def _of_lists(texts: dict[str, str], files: Files, asked: Asked) -> StackSpec:
    listings = [_listing(source, text, files) for source, text in texts.items()]
    mentions = [mention for listing in listings for mention in listing.mentions]
    whole = list(texts) == ["-"] and {mention.package for mention in mentions} >= _REQUIRED_BY_TRL
    return combine(
        mentions,
        ", ".join(map(_where, texts)),
        asked,
        lock=False,
        complete=whole and not any(listing.unnamed for listing in listings),
        ignored=[note for listing in listings for note in listing.notes],
    )


def _listing(source: str, text: str, files: Files) -> Listing:
    listing = read_listing(text, _where(source), None if source == "-" else Path(source).resolve(), files)
    if not listing.requirements and not listing.mentions:
        raise StackSpecError(
            f"{_where(source)}: empty; expected a list of requirements such as the output of pip freeze"
        )
    return listing
