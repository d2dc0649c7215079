"""A GRPO training whose vLLM is a server, watched inside a rank: what is handed to it, holds and returns.

Imports the stack only inside functions.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError

from pytest_trlcompat.inference.engine_weights import engine_weights

if TYPE_CHECKING:
    import torch

__all__ = ["Held", "held", "outputs_of", "watch_handing_over"]


@dataclass(frozen=True)
class Held:
    """Stands for the engine's module, which is in another process: what it holds."""

    tensors: Mapping[str, torch.Tensor]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


def held(url: str, trainer: Any) -> Held | None:
    """What the engine of a server holds now; ``None`` where it does not answer. Collective.

    The main process asks, for all: it hands the weights over, and the others do not wait for that.
    """
    from accelerate.utils import broadcast_object_list

    found: list[Mapping[str, torch.Tensor] | None] = [None]
    if trainer.accelerator.is_main_process:
        try:
            found = [engine_weights(url)]
        except HTTPError:  # it answers, and could not save them
            raise
        except (ConnectionError, URLError):
            pass
    (tensors,) = broadcast_object_list(found)
    return None if tensors is None else Held(tensors)


@dataclass(frozen=True)
class _Choice:
    logprob: float


@dataclass(frozen=True)
class _Completion:
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, _Choice]] | None


@dataclass(frozen=True)
class _Output:
    prompt_token_ids: Sequence[int]
    outputs: Sequence[_Completion]


def outputs_of(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[Sequence[float]]] | None,
    logprob_token_ids: Sequence[Sequence[Sequence[int]]] | None,
) -> list[_Output]:
    """What ``VLLMGeneration.generate`` of TRL returned to this rank, in the form of vLLM's own engine."""
    chosen: Sequence[Sequence[Mapping[int, _Choice]] | None]
    if logprobs is None or logprob_token_ids is None:
        chosen = [None] * len(completion_ids)
    else:
        chosen = list(map(_choices, logprobs, logprob_token_ids))
    rows = zip(prompt_ids, completion_ids, chosen, strict=True)
    return [_Output(prompt, (_Completion(ids, choices),)) for prompt, ids, choices in rows]


def _choices(values: Sequence[Sequence[float]], names: Sequence[Sequence[int]]) -> list[dict[int, _Choice]]:
    return [
        {token: _Choice(value) for token, value in zip(tokens, row, strict=True)}
        for tokens, row in zip(names, values, strict=True)
    ]


def watch_handing_over(trainer: Any, loaded: Sequence[Counter[str]]) -> None:
    """Count in the last of ``loaded`` the names that are handed to the server.

    The client fills a buffer with many tensors before it sends it. One whose memory is freed meanwhile would be read
    all the same, and the process would end with SIGSEGV, as it does without this watch. That is looked for, and the
    training ended with a ``RuntimeError`` before it happens.
    """
    client = trainer.vllm_generation.vllm_client
    if not hasattr(client, "update_named_params"):  # TRL's own server gets one weight at a time
        hand_over = client.update_named_param

        @functools.wraps(hand_over)
        def handed_over(name: str, weights: torch.Tensor) -> None:
            if loaded:
                loaded[-1][name] += 1
            hand_over(name, weights)

        client.update_named_param = handed_over
        return
    update = client.update_named_params

    def watched(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        given: list[tuple[str, torch.Tensor]] = []
        for name, tensor in tensors:
            _check(given, client)
            given.append((name, tensor))
            if loaded:
                loaded[-1][name] += 1
            yield name, tensor
        _check(given, client)

    @functools.wraps(update)
    def updated(metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        update(metadata, watched(named_params))

    client.update_named_params = updated


def _check(given: Sequence[tuple[str, torch.Tensor]], client: Any) -> None:
    freed = [name for name, tensor in given if tensor.untyped_storage().size() == 0]
    if freed:
        client.communicator.leave()  # or the server, and TRL's client with it, would wait for the rest
        raise RuntimeError(f"freed before it was sent: {', '.join(freed)}")
