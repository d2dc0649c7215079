"""From files, or from standard input, to the stack that they specify: lists of requirements, or a lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_trlcompat.doctor.alternatives import Asked, combine
from pytest_trlcompat.doctor.files import Files, decoded
from pytest_trlcompat.doctor.lists import read_listing
from pytest_trlcompat.doctor.locks import looks_like_lock, read_lock
from pytest_trlcompat.doctor.requirements import Listing
from pytest_trlcompat.doctor.stack_spec import StackSpec, StackSpecError
from pytest_trlcompat.stack import REQUIRED_BY_TRL

__all__ = ["read_documents"]

_STDIN = "standard input"


def read_documents(sources: Sequence[str], stdin: Callable[[int], bytes], asked: Asked) -> StackSpec:
    """The stack of one lock, or of lists.

    Args:
        sources: paths, or ``-`` for standard input.
        stdin: reads at most so many bytes of standard input.

    Raises:
        StackSpecError: one of them cannot be read, or a lock is not alone.
    """
    files = Files(stdin, sources)
    if len(sources) == 1:
        (source,) = sources
        text = decoded(files.named_file(source), _where(source))
        # A lock may come from standard input, or have another name.
        if _is_lock(source) or looks_like_lock(text):
            return read_lock(text, _where(source), asked)
        return _of_lists({source: text}, files, asked)
    if any(_is_lock(source) for source in sources):
        raise StackSpecError(f"a lock cannot be combined with other files: {', '.join(sources)}; give one lock alone")
    return _of_lists({source: decoded(files.named_file(source), _where(source)) for source in sources}, files, asked)


def _is_lock(source: str) -> bool:
    return source.endswith((".toml", ".lock"))


def _where(source: str) -> str:
    return _STDIN if source == "-" else source


def _of_lists(texts: dict[str, str], files: Files, asked: Asked) -> StackSpec:
    listings = [_listing(source, text, files) for source, text in texts.items()]
    mentions = [mention for listing in listings for mention in listing.mentions]
    # A list of installed packages with all that TRL requires is that of a whole environment: what it lacks is absent.
    whole = list(texts) == ["-"] and {mention.package for mention in mentions}.issuperset(REQUIRED_BY_TRL)
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
