"""Token ids of prompts and completions as a batch, and which tokens count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Tokens", "pad", "tokens_of"]


@dataclass(frozen=True)
class Tokens:
    """A batch of completions with their prompts; ``R`` rows, ``P`` and ``C`` tokens in the longest of each.

    Attributes:
        prompt_ids: ``(R, P)``, padded on the left.
        prompt_mask: ``(R, P)``, false on padding.
        completion_ids: ``(R, C)``, padded on the right; what follows the first end of sequence stays as it was given.
        completion_mask: ``(R, C)``, true up to and including the first end of sequence; with results of tools, to the
            end of the last turn.
        sampled_mask: ``(R, C)``, ``completion_mask`` without the results of tools.
        terminated: ``(R,)``, whether a completion has an end of sequence; one that has none was truncated.
        loss_mask: ``(R, C)``, ``sampled_mask`` without the completions that are excluded from the loss.
        inputs: of each row, inputs of a model other than tokens, see :class:`~pytest_trlcompat.reference.Rollout`;
            empty if no row has any.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    sampled_mask: Tensor
    terminated: Tensor
    loss_mask: Tensor
    inputs: Sequence[Mapping[str, Tensor]] = ()

    @property
    def lengths(self) -> Tensor:
        """``(R,)``: tokens of each completion up to and including its end of sequence."""
        return self.completion_mask.sum(1)

    @property
    def sampled_lengths(self) -> Tensor:
        """The same without results of tools."""
        return self.sampled_mask.sum(1)

    def count(self) -> int:
        """Tokens of all prompts and completions, of each completion's prompt anew, without results of tools."""
        return int(self.prompt_mask.sum() + self.sampled_mask.sum())

    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """Of each row the ids of the prompt and of the completion without padding, ``(tokens,)`` each."""
        return [
            (prompt[mask], completion[:length])
            for prompt, mask, completion, length in zip(
                self.prompt_ids, self.prompt_mask, self.completion_ids, self.lengths.tolist(), strict=True
            )
        ]

    def of_rows(self, rows: Sequence[int]) -> Tokens:
        """Some of the rows, as wide as before."""
        tensors = {name: value[list(rows)] for name, value in vars(self).items() if name != "inputs"}
        return Tokens(**tensors, inputs=tuple(self.inputs[row] for row in rows if self.inputs))


def pad(rows: Sequence[Sequence[int]], value: int, *, side: str, multiple_of: int | None = None) -> Tensor:
    """Rows of unequal lengths as one tensor.

    Args:
        rows: ``R`` rows of token ids.
        value: to pad with.
        side: ``"left"`` or ``"right"``, where padding goes.
        multiple_of: the width is padded up to a multiple of it (``pad_to_multiple_of``).

    Returns:
        ``(R, N)``, int64; ``N`` is the length of the longest row, or the next multiple.

    Raises:
        ValueError: for no rows, and for an unknown side.

    Source: "Padding and truncation" in Transformers' documentation; ``pad_to_multiple_of`` in that of ``GRPOConfig``.
    """
    if not rows:
        raise ValueError("there are no rows to pad")
    if side not in ("left", "right"):
        raise ValueError(f"side={side!r} is neither 'left' nor 'right'")
    width = max(map(len, rows))
    if multiple_of:
        width = -(-width // multiple_of) * multiple_of
    padding = [[value] * (width - len(row)) for row in rows]
    padded = [[*gap, *row] if side == "left" else [*row, *gap] for row, gap in zip(rows, padding, strict=True)]
    return torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width)


def tokens_of(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    eos_token_id: int | Sequence[int],
    mask_truncated_completions: bool = False,
    max_prompt_length: int | None = None,
    pad_to_multiple_of: int | None = None,
    sampled: Sequence[Sequence[bool]] | None = None,
    inputs: Sequence[Mapping[str, Tensor]] = (),
) -> Tokens:
    """Prompts and their completions as a batch.

    A completion ends with its first end of sequence; that token counts, and everything after it is masked: policy
    and reward are defined on ``o_1 ... o_|o|`` (DeepSeekMath, section 4.1.1). Padding is masked by where it is, not by
    its id, so that a pad token that is also the end of sequence makes no difference.

    Args:
        prompts: ``R`` rows of token ids without padding.
        completions: ``R`` rows of token ids; what a batched generation appended after the end of sequence may be there.
        pad_token_id: fills both tensors.
        eos_token_id: ends a completion; of several each does.
        mask_truncated_completions: exclude completions without an end of sequence from the loss ("Overlong
            Filtering", DAPO, section 3.4).
        max_prompt_length: "If the prompt is longer than this value, it will be truncated left", until 0.27.
        pad_to_multiple_of: of both widths.
        sampled: of each completion, which of its tokens the policy sampled; the others are results of tools. A
            completion of several turns has an end of sequence in each, and is terminated by one at its end.
        inputs: of each prompt, inputs of a model other than tokens.

    Raises:
        ValueError: for unequal numbers of prompts and completions, or of tokens and what is said of them, for an
            empty prompt or completion, and for a prompt with ``inputs`` that would be truncated.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts have {len(completions)} completions")
    for name, rows in (("prompt", prompts), ("completion", completions)):
        empty = [row for row, ids in enumerate(rows) if not ids]
        if empty:
            raise ValueError(f"the {name} of row {empty[0]} is empty")

    if inputs and len(inputs) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts have inputs for {len(inputs)}")
    if max_prompt_length is not None:
        cut = [row for row, row_inputs in enumerate(inputs) if row_inputs and len(prompts[row]) > max_prompt_length]
        if cut:
            raise ValueError(f"the prompt of row {cut[0]}, which has images, say, is longer than {max_prompt_length}")
        prompts = [ids[max(0, len(ids) - max_prompt_length) :] for ids in prompts]

    def present(rows: Sequence[Sequence[int]], side: str) -> Tensor:
        return pad([[1] * len(row) for row in rows], 0, side=side, multiple_of=pad_to_multiple_of).bool()

    ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)
    if sampled is None:
        ended = [_first_end(ids, ends) for ids in completions]
        terminated = torch.tensor([not ends.isdisjoint(ids) for ids in completions])
    else:
        ended = [len(ids) for ids in completions]
        terminated = torch.tensor([ids[-1] in ends for ids in completions])
        if [len(mask) for mask in sampled] != ended:
            raise ValueError(f"completions have {ended} tokens, sampled says of {[len(mask) for mask in sampled]}")
    completion_mask = present([ids[:end] for ids, end in zip(completions, ended, strict=True)], "right")
    completion_ids = pad(completions, pad_token_id, side="right", multiple_of=pad_to_multiple_of)
    # The longest completion may have lost what follows its end of sequence.
    missing = completion_ids.shape[1] - completion_mask.shape[1]
    completion_mask = torch.nn.functional.pad(completion_mask, (0, missing))
    sampled_mask = completion_mask
    if sampled is not None:
        sampled_mask = pad([*map(list, sampled)], 0, side="right", multiple_of=pad_to_multiple_of).bool()
    counted = terminated | (not mask_truncated_completions)
    return Tokens(
        prompt_ids=pad(prompts, pad_token_id, side="left", multiple_of=pad_to_multiple_of),
        prompt_mask=present(prompts, "left"),
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        sampled_mask=sampled_mask,
        terminated=terminated,
        loss_mask=sampled_mask & counted[:, None],
        inputs=tuple(inputs) if any(inputs) else (),
    )


def _first_end(ids: Sequence[int], ends: set[int]) -> int:
    """How many tokens there are up to and including the first end of sequence."""
    return next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))
