"""A GRPO training whose vLLM is a server, watched inside a rank: what is handed to it, holds and returns."""

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

__all__ = [
    "Held",
    "of_plain",
    "outputs_of",
    "plain",
    "rows_of",
    "rows_returned",
    "server_weights",
    "server_weights_here",
    "watch_handing_over",
    "with_recorded",
]


@dataclass(frozen=True)
class Held:
    """Stands for the engine's module, which is in another process: what it holds."""

    tensors: Mapping[str, torch.Tensor]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


def server_weights(url: str, trainer: Any) -> Held | None:
    """The weights that a server's engine holds now; ``None`` where it does not answer. Collective.

    The main process asks, for all: it hands the weights over, and the others do not wait for that.
    """
    from accelerate.utils import broadcast_object_list

    answers = [server_weights_here(url) if trainer.accelerator.is_main_process else None]
    (tensors,) = broadcast_object_list(answers)
    return None if tensors is None else Held(tensors)


def server_weights_here(url: str) -> Mapping[str, torch.Tensor] | None:
    """As :func:`server_weights`, asked by this process and for it alone."""
    try:
        return engine_weights(url)
    except HTTPError:  # it answers, and could not save them
        raise
    except (ConnectionError, URLError):
        return None


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


def outputs_of(returned: Sequence[Any]) -> list[_Output]:
    """What ``VLLMGeneration.generate`` of TRL returned to this rank, in the form of vLLM's own engine.

    Args:
        returned: the ids of prompts and completions, log-probabilities, and from 0.29 on the ids that they belong to;
            in 0.28 there is one for each token.
    """
    prompt_ids, completion_ids, logprobs, *rest = returned
    names = rest[0] if rest else None
    chosen: Sequence[Sequence[Mapping[int, _Choice]] | None]
    if logprobs is None:
        chosen = [None] * len(completion_ids)
    elif isinstance(names, list):
        chosen = list(map(_choices, logprobs, names))
    else:
        chosen = list(map(_choices_of_tokens, logprobs, completion_ids))
    rows = zip(prompt_ids, completion_ids, chosen, strict=True)
    return [_Output(prompt, (_Completion(ids, choices),)) for prompt, ids, choices in rows]


def _choices(values: Sequence[Sequence[float]], names: Sequence[Sequence[int]]) -> list[dict[int, _Choice]]:
    return [
        {token: _Choice(value) for token, value in zip(tokens, row, strict=True)}
        for tokens, row in zip(names, values, strict=True)
    ]


def _choices_of_tokens(values: Sequence[float], tokens: Sequence[int]) -> list[dict[int, _Choice]]:
    return [{token: _Choice(value)} for token, value in zip(tokens, values, strict=True)]


def rows_of(outputs: Sequence[Any]) -> list[_Output]:
    """One output for each completion."""
    return [
        _Output(list(output.prompt_token_ids), (_Completion(list(completion.token_ids), _bare(completion.logprobs)),))
        for output in outputs
        for completion in output.outputs
    ]


def _bare(logprobs: Any) -> list[dict[int, _Choice]] | None:
    if logprobs is None:
        return None
    return [{token: _Choice(float(choice.logprob)) for token, choice in step.items()} for step in logprobs]


def plain(rows: Sequence[_Output]) -> list[Any]:
    """The same in values that can be sent to another rank, to be read by :func:`of_plain`."""
    plain_rows = []
    for row in rows:
        (completion,) = row.outputs
        logprobs = completion.logprobs
        values = (
            None if logprobs is None else [{name: choice.logprob for name, choice in step.items()} for step in logprobs]
        )
        plain_rows.append((list(row.prompt_token_ids), list(completion.token_ids), values))
    return plain_rows


def of_plain(rows: Sequence[Any]) -> list[_Output]:
    outputs = []
    for prompt, tokens, values in rows:
        logprobs = None if values is None else [{name: _Choice(logp) for name, logp in step.items()} for step in values]
        outputs.append(_Output(prompt, (_Completion(tokens, logprobs),)))
    return outputs


def with_recorded(llm: Any, outputs: Sequence[Any]) -> Sequence[Any]:
    """Of the recording engine also the log-probabilities by which it chose, where a trainer has asked for none."""
    completions = [completion for output in outputs for completion in output.outputs]
    if not hasattr(llm, "asked") or any(completion.logprobs is not None for completion in completions):
        return outputs
    asked = iter(llm.asked[-len(completions) :])
    recorded = []
    for output in outputs:
        rows = []
        for completion in output.outputs:
            row = next(asked)
            assert row.token_ids == list(completion.token_ids), "the engine recorded something else than it returned"
            chosen = [{token: _Choice(logp)} for token, logp in zip(row.token_ids, row.logprobs, strict=True)]
            rows.append(_Completion(row.token_ids, chosen))
        recorded.append(_Output(list(output.prompt_token_ids), rows))
    return recorded


def rows_returned(tokenizer: Any, prompts: Sequence[str], count: int, returned: Any) -> list[_Output]:
    """What the client of TRL's own server returned before 0.28: one output for each completion.

    Args:
        returned: the completions' ids; from 0.23 on a dictionary that has also the sampler's log-probabilities.
    """
    answer = returned if isinstance(returned, dict) else {"completion_ids": returned}
    ids = [list(tokenizer(prompt, add_special_tokens=False)["input_ids"]) for prompt in prompts]
    asked = [prompt_ids for prompt_ids in answer.get("prompt_ids") or ids for _ in range(count)]
    logprobs = answer.get("logprobs") or [None] * len(asked)
    outputs = []
    for prompt, tokens, values in zip(asked, answer["completion_ids"], logprobs, strict=True):
        choices = None if values is None else _choices_of_tokens(values, tokens)
        outputs.append(_Output(prompt, (_Completion(tokens, choices),)))
    return outputs


def watch_handing_over(client: Any, loaded: Sequence[Counter[str]]) -> None:
    """Count in the last of ``loaded`` the names that are handed to the server.

    The client fills a buffer with many tensors before it sends it. One whose memory is freed meanwhile would be read
    all the same, and the process would end with SIGSEGV, as it does without this watch. That is looked for, and the
    training ended with a ``RuntimeError`` before it happens.
    """
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
        handed: list[tuple[str, torch.Tensor]] = []
        for name, tensor in tensors:
            _check(handed, client)
            handed.append((name, tensor))
            if loaded:
                loaded[-1][name] += 1
            yield name, tensor
        _check(handed, client)

    @functools.wraps(update)
    def updated(metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        update(metadata, watched(named_params))

    client.update_named_params = updated


def _check(handed: Sequence[tuple[str, torch.Tensor]], client: Any) -> None:
    freed = [name for name, tensor in handed if tensor.untyped_storage().size() == 0]
    if freed:
        # Or the server, and TRL's client with it, would wait for the rest.
        client.communicator.leave()
        raise RuntimeError(f"freed before it was sent: {', '.join(freed)}")
