"""The engine itself: ``LLM`` and its worker, as TRL calls them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.inference import engine_weights, gloo_transfer
from pytest_trlcompat.inference.recording_engine.model import RecordingModel
from pytest_trlcompat.inference.recording_engine.sampling import (
    Logprob,
    SamplingParams,
    choose,
    processed,
    with_logprobs,
)

if TYPE_CHECKING:
    import torch

__all__ = ["LLM", "Asked", "CompletionOutput", "RequestOutput", "Worker"]

_WITHOUT_EFFECT = (
    *("device", "distributed_executor_backend", "enforce_eager", "gpu_memory_utilization", "kv_cache_dtype"),
    *("max_num_batched_tokens", "max_num_seqs", "model_impl", "swap_space", "trust_remote_code"),
)
"""Arguments of vLLM's that decide where and how fast it computes, not what."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "enable_lora": (False,),
    "pipeline_parallel_size": (1,),
    "quantization": (None,),
    "revision": (None,),
    "speculative_config": (None,),
    "tensor_parallel_size": (1,),
}
"""Arguments that it takes only so."""
_MODES = ("raw_logprobs", "processed_logprobs")
_BLOCK = 16
"""Tokens of a block of the prefix cache, where ``block_size`` does not say it, as in vLLM on a GPU."""
_MOST_BLOCKS = 4096
_TAGS = frozenset({"weights", "kv_cache"})


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    finish_reason: str


@dataclass(frozen=True)
class RequestOutput:
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass(frozen=True)
class Asked:
    """A completion, as it is recorded.

    Attributes:
        logprobs: from which each token was chosen, whether they were asked for or not.
        stale: tokens of the prompt whose keys and values were computed with earlier weights, or from such.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    stale: int


class Worker:
    """What stands for vLLM's worker; TRL's own server extends it.

    Attributes:
        model_runner: has the ``model``.
    """

    def __init__(self, model: RecordingModel) -> None:
        import torch

        self.device = torch.device("cpu")
        self.rank = self.local_rank = 0
        self.model_runner = SimpleNamespace(model=model)
        self.parallel_config = SimpleNamespace(world_size=1, tensor_parallel_size=1)

    def reload_weights(self) -> None:
        self.model_runner.model.load_checkpoint()

    def _assert_memory_footprint_increased_during_profiling(self) -> None:
        """TRL replaces it; there is nothing to assert."""


@dataclass(frozen=True)
class _Block:
    """Keys and values of some tokens that follow on others.

    Attributes:
        layers: of each layer the keys and the values, ``(1, heads, tokens, size)``.
        version: of the earliest weights that had a part in them.
    """

    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    version: int


@dataclass
class _Prefixes:
    """The prefix cache: whole blocks of tokens. It does not know of weights: who changes them has to reset it.

    A block is found again by its own tokens and all before it. As in vLLM, those of completions are kept too. The last
    token of a prompt is always computed, so that a prompt of whole blocks has its last one computed again: as in vLLM's
    V1, where V0 computes the token alone.
    """

    enabled: bool
    size: int
    _kept: dict[tuple[int, ...], _Block] = field(default_factory=dict)

    def blocks_of(self, prompt: Sequence[int]) -> list[_Block]:
        """The blocks with which a prompt begins, without its last token."""
        blocks = []
        # Not up to the prompt's last token: its logits are needed, and only keys and values are kept.
        for end in range(self.size, len(prompt), self.size):
            if (block := self._kept.get(tuple(prompt[:end]))) is None:
                break
            blocks.append(block)
        return blocks

    def keep(self, tokens: Sequence[int], past: Any, version: int, known: int) -> None:
        """Keep the whole blocks of what was computed.

        Args:
            tokens: of a prompt and its completion, of which ``past`` has the keys and values.
            version: of the earliest weights that had a part in them.
            known: how many of the first blocks were found here.
        """
        if not self.enabled:
            return
        layers = _layers(past)
        for first in range(known * self.size, len(tokens) - self.size + 1, self.size):
            name = tuple(tokens[: first + self.size])
            if name not in self._kept:
                if len(self._kept) >= _MOST_BLOCKS:
                    # The oldest block: a dictionary keeps the order of insertion.
                    del self._kept[next(iter(self._kept))]
                # A copy: a view would keep the keys and values of the whole sequence in memory.
                pieces = [[part[..., first : first + self.size, :].clone() for part in layer] for layer in layers]
                self._kept[name] = _Block([(keys, values) for keys, values in pieces], version)

    def clear(self) -> None:
        self._kept.clear()


def _layers(past: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer of a cache of Transformers."""
    if hasattr(past, "layers"):  # from 4.54 on
        return [(layer.keys, layer.values) for layer in past.layers]
    return list(zip(past.key_cache, past.value_cache, strict=True))


class LLM:
    """What stands for ``vllm.LLM``.

    Args:
        model: a folder with a checkpoint.
        dtype: in which it computes; ``auto``: that of the checkpoint, or bfloat16 where that is float32.
        seed: of every request that has none of its own.
        block_size: tokens of a block of the prefix cache, 16 by default.
        worker_cls: a subclass of :class:`Worker`, or its full name.
        worker_extension_cls: the full name of a class that the worker gets as another base.
        logprobs_mode: which log-probabilities are returned: those of the logits, or those that tokens are chosen by.
        others: accepted where they change nothing of what is computed.

    Attributes:
        asked: every completion, in order.

    Raises:
        NotImplementedError: an argument that it would have to ignore.
        TypeError: one that TRL of no release passes.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        dtype: str = "auto",
        seed: int | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool | None = None,
        block_size: int | None = None,
        enable_sleep_mode: bool = False,
        worker_cls: type[Worker] | str = "auto",
        worker_extension_cls: str = "",
        logprobs_mode: str = "raw_logprobs",
        **others: Any,
    ) -> None:
        import torch
        from transformers import AutoTokenizer

        for name, value in others.items():
            if name not in (*_WITHOUT_EFFECT, *_NEUTRAL):
                raise TypeError(f"the recording engine, which stands for vLLM, knows no argument {name!r} of LLM")
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise NotImplementedError(f"the recording engine, which stands for vLLM, has no {name}={value!r}")
        if logprobs_mode not in _MODES:
            raise NotImplementedError(f"the recording engine has no logprobs_mode={logprobs_mode!r}")
        self._model = RecordingModel(model, dtype)
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer or model)
        self._ends = _ends(model, self._model.config, self._tokenizer)
        self._mode = logprobs_mode
        self._can_sleep = enable_sleep_mode
        self._asleep: set[str] = set()
        self._generator = torch.Generator().manual_seed(seed or 0)
        self._prefixes = _Prefixes(enable_prefix_caching is not False, block_size or _BLOCK)
        self.asked: list[Asked] = []
        self._length = max_model_len or self._model.config.max_position_embeddings
        self._worker = _worker_class(worker_cls, worker_extension_cls)(self._model)
        # What TRL reads and calls of vLLM's engine, at the places where it looks for it.
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=self._worker),
            model_config=SimpleNamespace(max_model_len=self._length, dtype=self._model.dtype),
            parallel_config=self._worker.parallel_config,
            reset_prefix_cache=self.reset_prefix_cache,
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the recording engine, which stands for vLLM, has no LLM.{name}")

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker, or a function with it."""
        if callable(method):
            return [method(self._worker, *args, **(kwargs or {}))]
        return [getattr(self._worker, method)(*args, **(kwargs or {}))]

    def reset_prefix_cache(self) -> bool:
        self._prefixes.clear()
        return True

    def sleep(self, level: int = 1) -> None:
        """Release memory: of the weights, which level 2 discards, and of the prefix cache."""
        if not self._can_sleep:
            raise ValueError("the recording engine sleeps where it was built with enable_sleep_mode=True alone")
        self.reset_prefix_cache()
        self._asleep = set(_TAGS)
        self._model.sleep(discard=level == 2)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        woken = _TAGS if tags is None else set(tags)
        if unknown := woken - _TAGS:
            raise ValueError(f"the recording engine has nothing called {', '.join(sorted(unknown))} to wake up")
        self._asleep -= woken
        if "weights" in woken:
            self._model.wake_up()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, token ids, or dictionaries with one of them.

        Raises:
            RuntimeError: it sleeps, or lacks weights.
            ValueError: a prompt is empty, or too long.
        """
        self._model.check_awake()
        if self._asleep:
            raise RuntimeError(f"the recording engine sleeps: {', '.join(sorted(self._asleep))}")
        prompt_list = prompts if isinstance(prompts, list) else [prompts]
        params = sampling_params or SamplingParams()
        params_of_prompts = params if isinstance(params, Sequence) else [params] * len(prompt_list)
        return [
            self._complete(prompt, of_prompt) for prompt, of_prompt in zip(prompt_list, params_of_prompts, strict=True)
        ]

    def _complete(self, prompt: Any, params: SamplingParams) -> RequestOutput:
        text, ids = self._ids(prompt)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        if not 0 < len(ids) < self._length:
            raise ValueError(f"a prompt of {len(ids)} tokens, where the engine takes up to {self._length - 1}")
        outputs = [self._output(index, ids, params) for index in range(params.n)]
        return RequestOutput(text, ids, outputs)

    def _ids(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            if unknown := {name for name, value in prompt.items() if value is not None} - {"prompt", _IDS}:
                raise NotImplementedError(f"the recording engine takes no {', '.join(sorted(unknown))} in a prompt")
            prompt = prompt[_IDS] if prompt.get(_IDS) is not None else prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, list(self._tokenizer(prompt)["input_ids"])
        return None, list(prompt)

    def _output(self, index: int, prompt: list[int], params: SamplingParams) -> CompletionOutput:
        import torch

        generator = self._generator
        if params.seed is not None:
            generator = torch.Generator().manual_seed(params.seed + index)
        most = self._length - len(prompt)
        with torch.no_grad():
            tokens, returned, reason = self._tokens(prompt, params, generator, min(most, params.max_tokens or most))
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if params.logprobs is None:
            return CompletionOutput(index, text, tokens, None, None, reason)
        # What vLLM calls cumulative_logprob is of the tokens that were chosen alone.
        total = sum(candidates[token].logprob for candidates, token in zip(returned, tokens, strict=True))
        return CompletionOutput(index, text, tokens, returned, total, reason)

    def _tokens(
        self, prompt: list[int], params: SamplingParams, generator: torch.Generator, most: int
    ) -> tuple[list[int], list[dict[int, Logprob]], str]:
        """Tokens, the log-probabilities to return, and why it ended."""
        past, blocks = self._past(prompt)
        tokens: list[int] = []
        logprobs: list[float] = []
        returned: list[dict[int, Logprob]] = []
        reason = "length"
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        ends = {*([] if params.ignore_eos else self._ends), *(params.stop_token_ids or [])}
        step = prompt[-1:]
        while len(tokens) < most:
            past, logits = self._forward(step, past)
            if len(tokens) < params.min_tokens:
                logits[list(ends)] = -float("inf")
            chosen_by = processed(logits, params, [*prompt, *tokens])
            token = choose(chosen_by, params, generator)
            step = [token]
            tokens.append(token)
            logprobs.append(float(chosen_by[token]))
            if params.logprobs is not None:
                shown = chosen_by if self._mode == "processed_logprobs" else logits.log_softmax(-1)
                returned.append(with_logprobs(shown, token, params.logprobs))
            if token in ends or any(stop in self._tokenizer.decode(tokens) for stop in stops):
                reason = "stop"
                break
        # What was computed from a stale block is as stale as that.
        version = min(block.version for block in [*blocks, _Block((), self._model.version)])
        # Without the last token: it was chosen, and never given to the network, so that nothing was computed of it.
        self._prefixes.keep([*prompt, *tokens[:-1]], past, version, len(blocks))
        stale = self._prefixes.size * sum(block.version < self._model.version for block in blocks)
        self.asked.append(Asked(list(prompt), list(tokens), logprobs, stale))
        return tokens, returned, reason

    def _past(self, prompt: list[int]) -> tuple[Any, list[_Block]]:
        """Keys and values of all but the last token of a prompt, and the blocks of them that were not computed now."""
        from transformers import DynamicCache

        blocks = self._prefixes.blocks_of(prompt)
        past = DynamicCache()
        for block in blocks:
            for number, (keys, values) in enumerate(block.layers):
                past.update(keys, values, number)
        rest = prompt[len(blocks) * self._prefixes.size : -1]
        if rest:
            past, _ = self._forward(rest, past)
        return past, blocks

    def _forward(self, ids: Sequence[int], past: Any) -> tuple[Any, torch.Tensor]:
        import torch

        result = self._model.network(input_ids=torch.tensor([list(ids)]), past_key_values=past, use_cache=True)
        return result.past_key_values, result.logits[0, -1].float()


_IDS = "prompt_token_ids"


def _worker_class(chosen: type[Worker] | str, extension: str) -> type[Worker]:
    if isinstance(chosen, str):
        chosen = Worker if chosen == "auto" else _named(chosen)
    if not extension:
        return chosen
    added = _named(extension)
    gloo_transfer.adapt_extension(importlib.import_module(added.__module__))
    return type("Worker", (chosen, added), {})


def _named(full_name: str) -> type[Any]:
    module, _, name = full_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _ends(path: str, config: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a completion: those of the checkpoint's generation config, and the tokenizer's."""
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos = config.eos_token_id
    ids = eos if isinstance(eos, list) else [eos]
    return {token for token in (*ids, tokenizer.eos_token_id) if token is not None}


engine_weights.offer(Worker, LLM)
