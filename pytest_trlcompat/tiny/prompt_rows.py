"""Prompts of words that the tiny models' tokenizers know."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pytest_trlcompat.tiny.tokenizer import SPECIAL_TOKENS

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["prompts"]


def prompts(n: int = 16, *, words: int | tuple[int, int] = (3, 6), vocab_size: int = 64) -> Dataset:
    """A dataset of ``n`` prompts of known words, the same ones at every call, in the column ``prompt``.

    Args:
        n: number of rows.
        words: words in each prompt; a pair gives the shortest and the longest, so that a batch needs padding.
        vocab_size: of the model; the rows go through its words from first to last, over and over.
    """
    from datasets import Dataset

    shortest, longest = (words, words) if isinstance(words, int) else words
    if not 1 <= shortest <= longest:
        raise ValueError(
            f"words={words!r} is neither the length of a prompt nor a pair of the shortest and the longest"
        )
    known = vocab_size - len(SPECIAL_TOKENS)
    vocabulary = itertools.cycle(f"w{word}" for word in range(known))
    lengths = [shortest + row % (longest - shortest + 1) for row in range(n)]
    rows = [" ".join(itertools.islice(vocabulary, length)) for length in lengths]
    return Dataset.from_dict({"prompt": rows})
