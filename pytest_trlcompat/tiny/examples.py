"""Datasets of words that the tiny models' tokenizers know, in the forms that TRL documents.

Every call gives the same rows. Their lengths are unequal, so that a batch needs padding. Their words go through the
vocabulary from first to last, over and over, so that no two texts of a small dataset are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.tiny.tokenizer import SPECIAL_TOKENS

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["conversations", "preferences", "prompts", "unpaired_preferences"]


def prompts(n: int = 16, *, words: int | tuple[int, int] = (3, 6), vocab_size: int = 64) -> Dataset:
    """A dataset of ``n`` prompts, in the column ``prompt``.

    Args:
        n: number of rows.
        words: words in each prompt; a pair gives the shortest and the longest.
        vocab_size: of the model.

    Raises:
        ValueError: ``words`` is no such length.
    """
    texts = _texts(words, vocab_size)
    return _dataset([{"prompt": next(texts)} for _ in range(n)])


def conversations(
    n: int = 16, *, words: int | tuple[int, int] = (2, 4), turns: int | tuple[int, int] = (1, 2), vocab_size: int = 64
) -> Dataset:
    """A dataset of ``n`` conversations, in the column ``messages``: a user and an assistant speak in turns.

    Args:
        words: words in each message; a pair gives the shortest and the longest.
        turns: questions with their answers; likewise.

    Raises:
        ValueError: ``words`` or ``turns`` is no such length.
    """
    texts, counts = _texts(words, vocab_size), _lengths(turns, "turns", "a conversation")

    def messages() -> list[dict[str, str]]:
        roles = ("user", "assistant") * next(counts)
        return [{"role": role, "content": next(texts)} for role in roles]

    return _dataset([{"messages": messages()} for _ in range(n)])


def preferences(
    n: int = 16, *, words: int | tuple[int, int] = (2, 4), conversational: bool = False, vocab_size: int = 64
) -> Dataset:
    """A dataset of ``n`` preferences, in the columns ``prompt``, ``chosen`` and ``rejected``.

    Args:
        words: words in each text; a pair gives the shortest and the longest.
        conversational: each text is a list with one message.

    Raises:
        ValueError: ``words`` is no such length.
    """
    parts = _parts(("prompt", "chosen", "rejected"), words, conversational, vocab_size)
    return _dataset(list(itertools.islice(parts, n)))


def unpaired_preferences(
    n: int = 16, *, words: int | tuple[int, int] = (2, 4), conversational: bool = False, vocab_size: int = 64
) -> Dataset:
    """A dataset of ``n`` completions, in the columns ``prompt``, ``completion`` and ``label``, every other one liked.

    Args:
        words: words in each text; a pair gives the shortest and the longest.
        conversational: each text is a list with one message.

    Raises:
        ValueError: ``words`` is no such length.
    """
    parts = _parts(("prompt", "completion"), words, conversational, vocab_size)
    return _dataset([{**part, "label": row % 2 == 0} for row, part in enumerate(itertools.islice(parts, n))])


def _parts(
    columns: tuple[str, ...], words: int | tuple[int, int], conversational: bool, vocab_size: int
) -> Iterator[dict[str, Any]]:
    texts = _texts(words, vocab_size)

    def part(column: str) -> str | list[dict[str, str]]:
        role = "user" if column == "prompt" else "assistant"
        return [{"role": role, "content": next(texts)}] if conversational else next(texts)

    while True:
        yield {column: part(column) for column in columns}


def _texts(words: int | tuple[int, int], vocab_size: int) -> Iterator[str]:
    lengths = _lengths(words, "words", "a text")
    vocabulary = itertools.cycle(f"w{word}" for word in range(vocab_size - len(SPECIAL_TOKENS)))
    return (" ".join(itertools.islice(vocabulary, length)) for length in lengths)


def _lengths(bounds: int | tuple[int, int], name: str, of: str) -> Iterator[int]:
    shortest, longest = (bounds, bounds) if isinstance(bounds, int) else bounds
    if not 1 <= shortest <= longest:
        raise ValueError(f"{name}={bounds!r} is neither the length of {of} nor a pair of the shortest and the longest")
    return itertools.cycle(range(shortest, longest + 1))


def _dataset(rows: list[dict[str, Any]]) -> Dataset:
    from datasets import Dataset

    return Dataset.from_list(rows)
