"""GRPO's objective written out by hand: what one optimizer step should have done, from the tokens alone.

Rewards, advantages, log-probabilities, the clipped ratio, the KL term and the normalisation are computed here again, by
plain full forward passes; nothing is taken from the trainer but which completions it trained on. Imports the stack only
inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import grpo

if TYPE_CHECKING:
    import torch

__all__ = ["Objective", "Row", "Trained", "group_of", "learn_by_heart", "logps"]

GROUP = 2
EPSILON = 0.2
_EOS, _PAD, _FIRST_WORD = 1, 0, 3


@dataclass(frozen=True)
class Row:
    """One completion of one prompt: token ids without padding, the end-of-sequence token included."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    @property
    def truncated(self) -> bool:
        return self.completion[-1] != _EOS


def group_of(prompt: tuple[int, ...], vocab_size: int) -> list[Row]:
    """The completions of a prompt: they depend on the prompt and the index in the group, and on nothing else."""
    return [Row(prompt, _completion(prompt, member, vocab_size)) for member in range(GROUP)]


def _completion(prompt: tuple[int, ...], member: int, vocab_size: int) -> tuple[int, ...]:
    """One to five words and, where there is room, the end-of-sequence token."""
    words = 1 + (sum(prompt) + 2 * member) % grpo.COMPLETION_LENGTH
    first = sum((index + 1) * token for index, token in enumerate(prompt)) + member * 17
    tokens = [_FIRST_WORD + (first + index * 5) % (vocab_size - _FIRST_WORD) for index in range(words)]
    return tuple([*tokens, _EOS][: grpo.COMPLETION_LENGTH])


@dataclass(frozen=True)
class Trained:
    """A row in a micro-batch, with its log-probabilities ``(K,)`` under the policy that sampled it."""

    row: Row
    sampled: torch.Tensor


@dataclass(frozen=True)
class Objective:
    """The objective of one training run.

    Attributes:
        start: the policy before training, which is the reference model; plain, whole and on the CPU.
        loss_type: ``grpo``, ``bnpo``, ``dr_grpo`` or ``dapo``, as TRL calls them.
        mask_truncated: whether completions without an end-of-sequence token count for nothing.
    """

    start: Any
    tokenizer: Any
    vocab_size: int
    loss_type: str
    beta: float = 0.5
    mask_truncated: bool = False

    def tokens(self, rows: Sequence[Row]) -> int:
        """How many tokens of ``rows`` count."""
        return sum(len(row.completion) for row in rows if not (self.mask_truncated and row.truncated))

    def gradient(
        self, policy: Any, microbatches: Sequence[Sequence[Trained]], tokens: float
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Of one optimizer step over all the rows of all ranks, in the micro-batches in which they were trained.

        Args:
            tokens: what ``dapo`` divides by: the tokens of the whole generation, times the share of it that a step
                trains on.

        Returns:
            The loss, and its gradient by parameter name.
        """
        import torch

        named = dict(policy.named_parameters())
        rows = [trained.row for part in microbatches for trained in part]
        current = logps(policy, rows)
        with torch.no_grad():
            reference = logps(self.start, rows)
        parts = [
            [self._token_losses(trained, current[trained.row], reference[trained.row]) for trained in part]
            for part in microbatches
        ]
        loss = self._aggregate(parts, tokens)
        gradients = torch.autograd.grad(loss, list(named.values()))
        return loss.item(), dict(zip(named, gradients, strict=True))

    def _aggregate(self, parts: Sequence[Sequence[torch.Tensor]], tokens: float) -> torch.Tensor:
        import torch

        every = [losses for part in parts for losses in part]
        if self.loss_type == "grpo":
            # A masked completion adds nothing, and is counted all the same.
            return torch.stack([losses.sum() / max(1, len(losses)) for losses in every]).mean()
        if self.loss_type == "bnpo":
            return torch.stack([torch.cat(list(part)).sum() / max(1, sum(map(len, part))) for part in parts]).mean()
        if self.loss_type == "dapo":
            return torch.cat(every).sum() / tokens
        raise ValueError(f"unknown loss type {self.loss_type!r}; known are grpo, bnpo and dapo")

    def _token_losses(self, trained: Trained, current: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        import torch

        if self.mask_truncated and trained.row.truncated:
            return current[:0]
        ratio = (current - trained.sampled).exp()
        advantage = self._advantage(trained.row)
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
        kl = (reference - current).exp() - (reference - current) - 1
        return self.beta * kl - surrogate

    def _advantage(self, row: Row) -> float:
        """Of the row within its group: reward less the mean, over the standard deviation plus 1e-4."""
        import torch

        group = group_of(row.prompt, self.vocab_size)
        texts = [self.tokenizer.decode(member.completion, skip_special_tokens=True) for member in group]
        rewards = torch.tensor(grpo.reward(texts), dtype=torch.float64)
        return float((rewards[group.index(row)] - rewards.mean()) / (rewards.std() + 1e-4))


def logps(policy: Any, rows: Sequence[Row]) -> dict[Row, torch.Tensor]:
    """Log-probabilities ``(K,)`` of each completion: a plain full forward pass.

    Nothing but padding on the right, where no token of a row looks.
    """
    import torch

    known = [torch.tensor([*row.prompt, *row.completion]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(known, batch_first=True, padding_value=_PAD)
    every = policy(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
    chosen = every.gather(-1, ids[:, 1:, None])[..., 0]
    return {
        row: chosen[index, len(row.prompt) - 1 : len(row.prompt) - 1 + len(row.completion)]
        for index, row in enumerate(rows)
    }


@contextmanager
def learn_by_heart(vocab_size: int) -> Iterator[list[Row]]:
    """Let generation run for real, for one token, then put the fixed completions in place of its tokens.

    Yields:
        A list that grows by the rows of each generation, in their order.
    """
    import torch
    from transformers.generation import GenerationMixin

    generate = GenerationMixin.generate
    sampled: list[Row] = []

    def fixed(self: Any, inputs: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        prompts = inputs if inputs is not None else kwargs["input_ids"]
        # A prompt may come back as several rows.
        generated = generate(self, inputs, **grpo.with_generation_settings(kwargs, max_new_tokens=1))
        width = prompts.shape[1]
        rows = []
        for index, prompt in enumerate(generated[:, :width].tolist()):
            known = tuple(token for token in prompt if token != _PAD)
            rows.append(group_of(known, vocab_size)[index % GROUP])
        sampled.extend(rows)
        padded = [[*row.completion, *[_PAD] * (grpo.COMPLETION_LENGTH - len(row.completion))] for row in rows]
        tokens = torch.tensor(padded, device=generated.device, dtype=generated.dtype)
        return torch.cat([generated[:, :width], tokens], dim=1)

    GenerationMixin.generate = fixed
    try:
        yield sampled
    finally:
        GenerationMixin.generate = generate
