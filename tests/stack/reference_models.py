"""Models whose log-probabilities can be worked out by hand."""

from __future__ import annotations

import torch
from torch import Tensor


class Bigrams(torch.nn.Module):
    """The next token depends on the last one alone: row ``i`` of ``table`` has the logits after token ``i``.

    With a table of zeros every token has the probability 1 / V, and the gradient of its log-probability with respect to
    its row is 1 - 1 / V at the token, and -1 / V elsewhere.
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table.clone())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        assert input_ids.shape == attention_mask.shape
        return self.table[input_ids]


def uniform(words: int = 4) -> Bigrams:
    return Bigrams(torch.zeros(words, words, dtype=torch.float64))


def random_bigrams(words: int = 8, seed: int = 0) -> Bigrams:
    generator = torch.Generator().manual_seed(seed)
    return Bigrams(torch.randn(words, words, dtype=torch.float64, generator=generator))
