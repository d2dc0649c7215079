"""Record what a trainer does not show from outside, at the functions through which it passes.

These are the arguments of ``generate``, of reward functions and of ``compute_loss``, the results of the method that
computes log-probabilities, and tables of completions.

Runs inside a rank.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.comparison import StepCountMismatch
from pytest_trlcompat.conformance.grpo import environments, tools
from pytest_trlcompat.conformance.grpo.methods import Method
from pytest_trlcompat.conformance.grpo.records import Generated, MicroBatchRecord, Recording
from pytest_trlcompat.conformance.grpo.sampling import Data, content, name_of

if TYPE_CHECKING:
    import torch

__all__ = ["fixed_completions", "prepared_config", "watched_function", "watched_tables", "watched_trainer"]


@contextlib.contextmanager
def fixed_completions(data: Data, recording: Recording, group: int) -> Iterator[None]:
    """Within, generation runs for one token, and the fixed completions replace what it drew."""
    import torch
    from transformers.generation import GenerationMixin

    generate: Callable[..., torch.Tensor] = GenerationMixin.generate
    rank = int(os.environ.get("RANK", "0"))

    def fixed(self: Any, inputs: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        prompts = inputs if inputs is not None else kwargs["input_ids"]
        masks = kwargs.get("attention_mask")
        config = copy.deepcopy(kwargs["generation_config"])
        max_new_tokens = config.max_new_tokens
        # One token is enough for the library to prepare its config, which is what is compared.
        config.max_new_tokens = 1
        with prepared_config() as prepared:
            drawn = generate(self, inputs, **{**kwargs, "generation_config": config})
        arguments = {name: getattr(prepared[0], name, None) for name in _GENERATION}
        width = prompts.shape[1]
        arguments |= {"max_new_tokens": max_new_tokens, "width": width}
        call = sum(earlier.evaluation == recording.in_evaluation for earlier in recording.generated)
        generated = Generated([], [], arguments, evaluation=recording.in_evaluation)
        size = group
        if recording.in_evaluation:
            size = recording.arguments.get("num_generations_eval") or group
        padding = config.pad_token_id or 0
        taken: set[int] = set()
        newest: list[list[int]] = []
        for row, ids in enumerate(drawn[:, :width].tolist()):
            if masks is not None:
                mask = masks[row * len(masks) // len(drawn)].tolist()  # a prompt may come back as several rows
                prompt = [token for token, real in zip(ids, mask, strict=True) if real]
            else:
                prompt = [token for token in ids if token != padding]
            if data.tools and tools.is_continued(prompt) and recording.generated:
                newest.append(_continued(data, recording.generated[-1], prompt, taken, (rank, size, call - 1)))
                continue
            generated.prompts.append(prompt)
            # Each rank has consecutive rows of the batch, and a group may begin on one rank and end on the next.
            member = (rank * len(drawn) + row) % size
            newest.append(
                tools.turn(data.seed, prompt, member, call, 0) if data.tools else data.completion(prompt, member, call)
            )
        generated.completions = [list(completion) for completion in newest]
        if data.tools:
            generated.sampled = [[True] * len(completion) for completion in newest]
        if generated.prompts:
            recording.generated.append(generated)
        longest = max(map(len, newest))
        rows = [[*completion, *[padding] * (longest - len(completion))] for completion in newest]
        return torch.cat([drawn[:, :width], torch.tensor(rows, dtype=drawn.dtype, device=drawn.device)], 1)

    GenerationMixin.generate = fixed
    try:
        yield
    finally:
        GenerationMixin.generate = generate


def _continued(
    data: Data, generated: Generated, prompt: Sequence[int], taken: set[int], place: tuple[int, int, int]
) -> list[int]:
    """The next turn of a completion; it is appended to the record, after the tokens that the prompt has in addition.

    Args:
        taken: rows that this call of ``generate`` has continued already; the continued one is added.
        place: rank, size of a group, and how often completions were sampled before.

    Raises:
        StepCountMismatch: the prompt continues no recorded completion.
    """
    assert generated.sampled is not None
    rank, size, call = place
    for row, (row_prompt, completion) in enumerate(zip(generated.prompts, generated.completions, strict=True)):
        begun = [*row_prompt, *completion]
        if row not in taken and list(prompt[: len(begun)]) == begun:
            taken.add(row)
            number = sum(is_sampled for is_sampled, _ in tools.turns(completion, generated.sampled[row]))
            between = list(prompt[len(begun) :])
            new = tools.turn(data.seed, row_prompt, (rank * len(generated.prompts) + row) % size, call, number)
            completion += [*between, *new]
            generated.sampled[row] += [*[False] * len(between), *[True] * len(new)]
            return new
    raise StepCountMismatch(f"tokens are sampled behind {list(prompt)}, which begins like no completion")


_GENERATION = (
    *("do_sample", "eos_token_id", "min_p", "repetition_penalty", "suppress_tokens", "temperature", "top_k", "top_p"),
)


@contextlib.contextmanager
def prepared_config() -> Iterator[list[Any]]:
    """Collect the generation configs as calls of ``generate`` use them, with the model's own settings merged."""
    from transformers.generation import GenerationMixin

    processors = GenerationMixin._get_logits_processor
    configs: list[Any] = []

    def seen(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        configs.append(copy.copy(generation_config))
        return processors(self, generation_config, *args, **kwargs)

    GenerationMixin._get_logits_processor = seen
    try:
        yield configs
    finally:
        GenerationMixin._get_logits_processor = processors


def watched_function(function: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    """The reward function, which records its arguments in the newest generation; a reward model stays as it is."""
    if hasattr(function, "forward"):
        return function

    def keep(kwargs: Mapping[str, Any]) -> None:
        recording.generated[-1].rewarded[name_of(function)] = {
            name: [content(value) if name != "target" else int(value) for value in kwargs[name]]
            for name in ("prompts", "completions", "target")
            if name in kwargs
        }
        if kwargs.get("environments") is not None:
            columns = recording.generated[-1].rewarded[name_of(function)]
            columns["environments"] = environments.calls_of(kwargs["environments"])

    if not hasattr(function, "__name__"):  # the trainer must get it without one, too
        return _watched_object(function, keep)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        keep(kwargs)
        return function(*args, **kwargs)

    return watched


def _watched_object(function: Callable[..., Any], keep: Callable[[Mapping[str, Any]], None]) -> Callable[..., Any]:
    """The same for a partial or an object, which have no ``__name__`` afterwards either."""

    def call(completions: Sequence[Any], **kwargs: Any) -> Any:
        keep({"completions": completions, **kwargs})
        return function(completions=completions, **kwargs)

    if isinstance(function, functools.partial):
        call.__name__ = name_of(function)
        return functools.partial(call)

    async def awaited(self: Any, **kwargs: Any) -> Any:
        return await call(**kwargs)

    is_async = inspect.iscoroutinefunction(type(function).__call__)
    caller = awaited if is_async else lambda self, **kwargs: call(**kwargs)
    return type(type(function).__name__, (), {"__call__": caller})()


@contextlib.contextmanager
def watched_tables(recording: Recording, method: Method) -> Iterator[None]:
    """Within, the function that prints completions records its arguments instead."""
    module = importlib.import_module(method.module)
    name = "print_prompt_completions_sample"
    if not hasattr(module, name):
        yield
        return
    printed = getattr(module, name)

    def keep(prompts: Any, completions: Any, rewards: Any = None, *args: Any, **kwargs: Any) -> None:
        by_function = (
            {function_name: list(values) for function_name, values in rewards.items()}
            if isinstance(rewards, dict)
            else {}
        )
        recording.tables.append((list(prompts), list(completions), by_function))

    setattr(module, name, keep)
    try:
        yield
    finally:
        setattr(module, name, printed)


def watched_trainer(trainer_class: type, recording: Recording) -> type:
    """A subclass of the trainer that records what its methods are given and return."""
    import torch

    methods = ("_get_per_token_logps_and_entropies", "_get_per_token_logps")
    # A subclass may define both; TRL's loss calls the one that TRL defines.
    of_trl = [base for base in trainer_class.__mro__ if base.__module__.partition(".")[0] == "trl"]
    method = next((name for name in methods if any(name in vars(base) for base in of_trl)), "")

    class Recording(trainer_class):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            batch = MicroBatchRecord(-1, [], evaluation=recording.in_evaluation)
            recording.micro_batches.append(batch)
            if isinstance(inputs, Mapping) and "completion_ids" in inputs:
                _keep(inputs, batch)
            recording.checkpointed += _checkpointed(model)
            try:
                return super().compute_loss(model, inputs, *args, **kwargs)
            finally:
                batch.generation = len(recording.generated) - 1  # 0.14 samples within compute_loss

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            recording.in_evaluation = True
            try:
                logs = super().evaluate(*args, **kwargs)
            finally:
                recording.in_evaluation = False
            logged = [entry for entry in self.state.log_history if "eval_loss" in entry]
            recording.evaluations.append((len(recording.steps), dict(logged[-1]) if logged else dict(logs)))
            recording.returned.append(dict(logs))
            return logs

    def scored(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores = getattr(super(Recording, self), method)(*args, **kwargs)
        both = scores if isinstance(scores, tuple) else (scores, None)
        # The policy's in its loss alone: TRL computes old and reference log-probabilities without gradients.
        if torch.is_grad_enabled() and both[0].requires_grad and recording.micro_batches:
            batch = recording.micro_batches[-1]
            for name, value in zip(("logprobs", "entropies"), both, strict=False):
                if value is not None:
                    batch.values.setdefault(name, []).extend(value.detach().float().cpu().tolist())
        return scores

    if method:
        setattr(Recording, method, scored)
    Recording.__name__ = trainer_class.__name__
    return Recording


def _checkpointed(model: Any) -> list[dict[str, Any]]:
    """The keywords with which the first module that checkpoints its activations does so; empty where none does."""
    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
    function = next((candidate for candidate in functions if candidate is not None), None)
    return [] if function is None else [dict(getattr(function, "keywords", {}))]


_INPUTS = {
    "advantages": "advantages",
    "old_per_token_logps": "old_logprobs",
    "ref_per_token_logps": "reference_logprobs",
}


def _keep(inputs: Mapping[str, Any], batch: MicroBatchRecord) -> None:
    prompts = zip(inputs["prompt_ids"].tolist(), inputs["prompt_mask"].tolist(), strict=True)
    bare = [tuple(token for token, real in zip(ids, mask, strict=True) if real) for ids, mask in prompts]
    batch.rows = list(zip(bare, map(tuple, inputs["completion_ids"].tolist()), strict=True))
    for name, quantity in _INPUTS.items():
        if inputs.get(name) is not None:
            batch.values[quantity] = inputs[name].detach().float().cpu().tolist()
    if inputs.get("pixel_values") is not None:
        batch.pixel_values = inputs["pixel_values"].detach().double().cpu().flatten(1)
    mask = inputs["completion_mask"].long()
    if inputs.get("tool_mask") is not None:
        mask = mask * inputs["tool_mask"].long()
    if inputs.get("old_logps") is not None:
        batch.values["old_sequence_logprobs"] = inputs["old_logps"].detach().float().cpu()[:, None].tolist()
    batch.values["completion_mask"] = mask.cpu().tolist()
