"""How a token is chosen: vLLM's sampling parameters, and what they do to the logits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["GuidedDecodingParams", "Logprob", "SamplingParams", "choose", "processed", "with_logprobs"]

_GREEDY = 1e-5
"""Below this temperature the most probable token is taken."""


@dataclass
class SamplingParams:
    """Those of vLLM that TRL passes, and those that users may pass through it.

    Raises:
        NotImplementedError: a value that this engine would have to ignore.
        ValueError: one that has no meaning.
    """

    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_logprobs: int | None = None
    guided_decoding: object = None
    structured_outputs: object = None

    def __post_init__(self) -> None:
        for parameter in fields(self):
            if parameter.name in _NOT_OFFERED and getattr(self, parameter.name) != parameter.default:
                raise NotImplementedError(f"the recording engine, which stands for vLLM, has no {parameter.name}")
        wrong = {
            "n": self.n < 1,
            "repetition_penalty": self.repetition_penalty <= 0,
            "temperature": self.temperature < 0,
            "top_p": not 0 < self.top_p <= 1,
            "top_k": self.top_k < -1,
            "min_p": not 0 <= self.min_p <= 1,
            "max_tokens": self.max_tokens is not None and self.max_tokens < 1,
            "min_tokens": self.min_tokens < 0,
            "logprobs": self.logprobs is not None and self.logprobs < 0,
            "truncate_prompt_tokens": self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1,
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(f"{name} cannot be {getattr(self, name)!r}")


_NOT_OFFERED = ("presence_penalty", "frequency_penalty", "prompt_logprobs", "guided_decoding", "structured_outputs")


class GuidedDecodingParams:
    """Can be imported, as TRL does, and not be made: this engine does not guide."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the recording engine, which stands for vLLM, cannot constrain what it generates")


@dataclass(frozen=True)
class Logprob:
    """Of one token: its rank is 1 for the most probable one."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def processed(logits: torch.Tensor, params: SamplingParams, seen: list[int]) -> torch.Tensor:
    """The log-probabilities from which a token is chosen.

    Args:
        logits: of one position, in float32.
        seen: the tokens of the prompt and of the completion so far.
    """
    import torch

    logits = logits.clone()
    if params.repetition_penalty != 1:
        ids = torch.tensor(sorted(set(seen)))
        repeated = logits[ids]
        logits[ids] = torch.where(
            # Less likely either way: a logit above 0 is divided, one below 0 multiplied.
            repeated > 0,
            repeated / params.repetition_penalty,
            repeated * params.repetition_penalty,
        )
    if params.temperature < _GREEDY:
        return logits.log_softmax(-1)
    logits /= params.temperature
    if params.min_p > 0:
        probabilities = logits.softmax(-1)
        logits[probabilities < params.min_p * probabilities.max()] = -torch.inf
    if 0 < params.top_k < logits.numel():
        logits[logits < logits.topk(params.top_k).values[-1]] = -torch.inf
    if params.top_p < 1:
        ordered, places = logits.sort(descending=True)
        # The mass before a token, so that the one that crosses top_p stays.
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits[places[before >= params.top_p]] = -torch.inf
    return logits.log_softmax(-1)


def choose(logprobs: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """A token, by the log-probabilities of :func:`processed`."""
    import torch

    if params.temperature < _GREEDY:
        return int(logprobs.argmax())
    return int(torch.multinomial(logprobs.exp(), 1, generator=generator))


def with_logprobs(logprobs: torch.Tensor, token: int, count: int) -> dict[int, Logprob]:
    """The chosen token's, and those of the ``count`` most probable ones."""
    chosen = [token, *logprobs.topk(count).indices.tolist()] if count else [token]
    return {
        candidate: Logprob(float(logprobs[candidate]), int((logprobs > logprobs[candidate]).sum()) + 1)
        for candidate in chosen
    }
