"""From the words of a command line to the stack that they specify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_trlcompat.doctor.locks import read_lock
from pytest_trlcompat.doctor.requirements import Listing, decoded, of_pins, read_listing
from pytest_trlcompat.doctor.stack_spec import StackSpec, StackSpecError, installed_here, of_mentions
from pytest_trlcompat.stack import PACKAGES

__all__ = ["read_stack_spec"]

_REQUIRED_BY_TRL = {"trl", "transformers", "torch", "accelerate", "datasets"}
"""A list of installed packages that has all of these describes a whole environment: what it lacks is not installed."""


def read_stack_spec(words: Sequence[str], files: Sequence[str], stdin: Callable[[], bytes]) -> StackSpec:
    """The stack of ``trlcompat doctor [-r FILE ...] [FILE | - | PIN ...]``; pins win over files.

    Raises:
        StackSpecError: when nothing can be read, or what was read names no package of the stack.
    """
    pins = [word for word in words if word != "-" and not _is_file(word)]
    sources = [*files, *(word for word in words if word == "-" or _is_file(word))]
    mentions = of_pins(pins)
    if not sources:
        return of_mentions(mentions, "the command line", complete=False) if pins else installed_here()
    if len(sources) == 1:
        spec = _read(sources[0], stdin)
    elif any(_is_lock(source) for source in sources):
        raise StackSpecError(f"a lock cannot be combined with other files: {', '.join(sources)}; give one lock alone")
    else:
        spec = _read_several(sources, stdin)
    if not spec.texts and not mentions:
        raise StackSpecError(f"{spec.source}: names none of {', '.join(PACKAGES)}; is this the right list?")
    return spec.with_versions(mentions) if mentions else spec


def _is_file(word: str) -> bool:
    """Whether a word cannot be a pin, by its form; a file that does not exist gets its own error message later."""
    return "=" not in word and (word.endswith((".toml", ".lock", ".txt", ".in")) or "/" in word or Path(word).is_file())


def _is_lock(source: str) -> bool:
    return source.endswith((".toml", ".lock"))


def _read(source: str, stdin: Callable[[], bytes]) -> StackSpec:
    if _is_lock(source):
        return read_lock(decoded(_bytes(source), source), source)
    data = stdin() if source == "-" else b""
    if data.lstrip().startswith((b"version = ", b"lock-version = ")):
        return read_lock(decoded(data, "standard input"), "standard input")
    return _read_several([source], lambda: data)


def _read_several(sources: Sequence[str], stdin: Callable[[], bytes]) -> StackSpec:
    listings = [_listing(source, stdin) for source in sources]
    mentions = [mention for listing in listings for mention in listing.mentions]
    complete = sources == ["-"] and {mention.package for mention in mentions} >= _REQUIRED_BY_TRL
    names = ["standard input" if source == "-" else source for source in sources]
    ignored = [line for listing in listings for line in listing.ignored]
    return of_mentions(mentions, ", ".join(names), complete=complete, ignored=ignored)


def _listing(source: str, stdin: Callable[[], bytes]) -> Listing:
    if source == "-":
        data, where, folder = stdin(), "standard input", None
    else:
        data, where, folder = _bytes(source), source, Path(source).resolve().parent
    listing = read_listing(decoded(data, where), where, folder)
    if not listing.requirements and not listing.mentions:
        raise StackSpecError(f"{where}: empty; expected a list of requirements such as the output of pip freeze")
    return listing


def _bytes(source: str) -> bytes:
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise StackSpecError(f"cannot read {source}: {error.strerror}") from error
