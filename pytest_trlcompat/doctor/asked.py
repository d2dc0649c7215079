"""From the words of a command line to the stack that they mean. Imports only rooms below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_trlcompat.doctor.given import Given, GivenError, installed_here, of_mentions
from pytest_trlcompat.doctor.locks import read_lock
from pytest_trlcompat.doctor.requirements import Listing, decoded, of_pins, read_listing
from pytest_trlcompat.stack import PACKAGES

__all__ = ["read_given"]

_REQUIRED_BY_TRL = {"trl", "transformers", "torch", "accelerate", "datasets"}
"""A list of installed packages that has all of these is a whole environment: what else it lacks is not installed."""


def read_given(words: Sequence[str], files: Sequence[str], stdin: Callable[[], bytes]) -> Given:
    """The stack of ``trlcompat doctor [-r FILE ...] [FILE | - | PIN ...]``; pins win over files.

    Raises:
        GivenError: nothing that can be read, or no package of the stack in it.
    """
    pins = [word for word in words if word != "-" and not _is_file(word)]
    sources = [*files, *(word for word in words if word == "-" or _is_file(word))]
    mentions = of_pins(pins)
    if not sources:
        return of_mentions(mentions, "the command line", complete=False) if pins else installed_here()
    if len(sources) == 1:
        given = _read(sources[0], stdin)
    elif any(_is_lock(source) for source in sources):
        raise GivenError(f"one lock alone can be judged at a time, and not together with other files: {sources}")
    else:
        given = _read_several(sources, stdin)
    if not given.texts and not mentions:
        raise GivenError(f"{given.source}: names none of {', '.join(PACKAGES)}; is this the right list?")
    return given.but(mentions) if mentions else given


def _is_file(word: str) -> bool:
    """A word that can be no pin, by its looks: files need not exist, their absence has a message of its own."""
    return "=" not in word and (word.endswith((".toml", ".lock", ".txt", ".in")) or "/" in word or Path(word).is_file())


def _is_lock(source: str) -> bool:
    return source.endswith((".toml", ".lock"))


def _read(source: str, stdin: Callable[[], bytes]) -> Given:
    if _is_lock(source):
        return read_lock(decoded(_bytes(source), source), source)
    data = stdin() if source == "-" else b""
    if data.lstrip().startswith((b"version = ", b"lock-version = ")):
        return read_lock(decoded(data, "standard input"), "standard input")
    return _read_several([source], lambda: data)


def _read_several(sources: Sequence[str], stdin: Callable[[], bytes]) -> Given:
    listings = [_listing(source, stdin) for source in sources]
    mentions = [mention for listing in listings for mention in listing.mentions]
    complete = sources == ["-"] and {mention.package for mention in mentions} >= _REQUIRED_BY_TRL
    names = ["standard input" if source == "-" else source for source in sources]
    passed_over = [line for listing in listings for line in listing.passed_over]
    return of_mentions(mentions, ", ".join(names), complete=complete, passed_over=passed_over)


def _listing(source: str, stdin: Callable[[], bytes]) -> Listing:
    if source == "-":
        data, where, folder = stdin(), "standard input", None
    else:
        data, where, folder = _bytes(source), source, Path(source).resolve().parent
    listing = read_listing(decoded(data, where), where, folder)
    if not listing.requirements and not listing.mentions:
        raise GivenError(f"{where}: empty; a list of requirements was expected, such as pip freeze prints")
    return listing


def _bytes(source: str) -> bytes:
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise GivenError(f"cannot read {source}: {error.strerror}") from error
