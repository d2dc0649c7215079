"""What one optimizer step of GRPO should have done, by :mod:`pytest_trlcompat.reference`, and completions known before.

Nothing is taken from the trainer but which completions it trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import grpo

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference

__all__ = ["Objective", "Row", "Trained", "group_of", "learn_by_heart"]

GROUP = 2
_EOS, _PAD, _FIRST_WORD = 1, 0, 3


@dataclass(frozen=True)
class Row:
    """One completion of one prompt: token ids without padding, the end-of-sequence token included."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


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
        return int(self._tokens_of(rows).loss_mask.sum())

    def logprobs(self, policy: Any, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Log-probabilities ``(K,)`` of each completion."""
        from pytest_trlcompat import reference

        scores = reference.score_tokens(policy, self._tokens_of(rows))
        return [values[: len(row.completion)] for values, row in zip(scores.logprobs, rows, strict=True)]

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
        loss = torch.stack([self._loss(policy, part, tokens, len(microbatches)) for part in microbatches]).sum()
        gradients = torch.autograd.grad(loss, list(named.values()))
        return loss.item(), dict(zip(named, gradients, strict=True))

    def _loss(self, policy: Any, part: Sequence[Trained], step_tokens: float, micro_batches: int) -> torch.Tensor:
        """What a micro-batch adds to the loss of the step."""
        import torch

        from pytest_trlcompat import reference

        settings = reference.GRPOSettings(num_generations=GROUP, loss_type=self.loss_type, beta=self.beta)
        tokens = self._tokens_of([trained.row for trained in part])
        sampled = torch.nn.utils.rnn.pad_sequence([trained.sampled for trained in part], batch_first=True)
        logprobs = reference.score_tokens(policy, tokens).logprobs
        with torch.no_grad():
            of_start = reference.score_tokens(self.start, tokens).logprobs
        advantages = torch.stack([self._advantage(trained.row) for trained in part])
        losses = reference.policy_losses(logprobs, sampled, advantages, tokens.loss_mask, settings)
        losses = losses + self.beta * reference.kl_estimate(logprobs, of_start)
        shares = reference.token_shares(
            tokens.loss_mask, settings, step_tokens=step_tokens, micro_batches=micro_batches
        )
        return (shares * losses).sum()

    def _tokens_of(self, rows: Sequence[Row]) -> reference.Tokens:
        from pytest_trlcompat import reference

        prompts, completions = [row.prompt for row in rows], [row.completion for row in rows]
        return reference.tokens_of(
            prompts,
            completions,
            pad_token_id=_PAD,
            eos_token_id=_EOS,
            mask_truncated_completions=self.mask_truncated,
        )

    def _advantage(self, row: Row) -> torch.Tensor:
        """Of the row within its group; a scalar."""
        import torch

        from pytest_trlcompat import reference

        group = group_of(row.prompt, self.vocab_size)
        texts = [self.tokenizer.decode(member.completion, skip_special_tokens=True) for member in group]
        rewards = torch.tensor(grpo.reward(texts), dtype=torch.float64)[:, None]
        return reference.advantages_of(rewards, GROUP).advantages[group.index(row)]


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
