"""A short GRPO training with a setting, and everything of it that the reference computes too.

Runs inside a rank; imports the stack only inside functions. What a trainer does not show from outside is looked at where
it passes by: what ``generate`` and reward functions are called with, what ``compute_loss`` is given, what the method
that computes log-probabilities returns, gradients and weights around the optimizer's step, and the logs.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import objects
from pytest_trlcompat.conformance.configs import config_of, known_part
from pytest_trlcompat.conformance.sampling import Data, content, name_of, reward_functions

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["Generated", "MicroBatchRecord", "Recording", "StepRecord", "record"]

@dataclass
class Generated:
    """One call of ``generate`` on one rank.

    Attributes:
        prompts, completions: token ids of each row, without padding.
        arguments: what decides how tokens are drawn, by name, as the call would have used it.
        rewarded: what each reward function was called with, by its name: completions, prompts, column.
        evaluation: whether it belongs to an evaluation.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    arguments: dict[str, Any]
    rewarded: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    evaluation: bool = False


@dataclass
class MicroBatchRecord:
    """One call of ``compute_loss`` on one rank.

    Attributes:
        generation: index of the newest one.
        rows: prompt ids without padding and completion ids with it, of each row; empty where this release gives ``compute_loss`` no tokens.
        values: by quantity, per row numbers or tokens' numbers, as far as the release shows them.
    """

    generation: int
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]]
    values: dict[str, list[Any]] = field(default_factory=dict)
    evaluation: bool = False


@dataclass
class StepRecord:
    """One step of the optimizer.

    Attributes:
        micro_batches: how many there were until now.
        gradients: of trained parameters, after clipping; weights: after the step; empty where they are sharded.
    """

    micro_batches: int
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@dataclass
class Recording:
    """A training on one rank.

    Attributes:
        arguments: fields of the config as the trainer has them.
        initial: parameters before training, by name, and which are trained.
        evaluations: of each evaluation, what was logged and after how many steps.
        tables: of completions that were printed: prompts, completions, and rewards by function.
        seeded: of two trainers with one seed, names of weights that differ.
        changed: dictionaries of the user's config that building the trainer changed: before and after.
        prompts_before_resuming: of each generation of a training that was resumed later.
        returned: by each evaluation.
        asked: of the datasets of ``training`` and of ``evaluation``, token ids and ``target`` of each prompt.
    """

    arguments: dict[str, Any]
    generated: list[Generated] = field(default_factory=list)
    micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    asked: dict[str, list[tuple[tuple[int, ...], int]]] = field(default_factory=dict)
    returned: list[dict[str, float]] = field(default_factory=list)
    tables: list[tuple[list[Any], list[Any], dict[str, list[float]]]] = field(default_factory=list)
    seeded: list[str] = field(default_factory=list)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    prompts_before_resuming: list[list[list[int]]] = field(default_factory=list)
    in_evaluation: bool = False


Whole = Callable[[Any], "dict[str, torch.Tensor]"]


def record(
    trainer_class: type, model: TinyModel, setting: Mapping[str, Any], seed: int = 0, whole: Whole | None = None
) -> Recording:
    """Train, and evaluate and resume where the setting says so.

    Args:
        trainer_class: a subclass of TRL's ``GRPOTrainer``, or that.
        setting: fields of the config, and values of :data:`~pytest_trlcompat.conformance.configs.AXES`.
        seed: of prompts and completions.
        whole: gathers the trained weights of a trainer, by their names in the bare model, where a strategy shards
            them; then no gradients are kept. Called on every rank.
    """
    import trl

    setting = known_part(trl, setting)
    config = config_of(trl, setting)
    found = Recording({})
    data = objects.data_of(model, setting, seed, config.max_completion_length)
    for part in ("training", "evaluation"):
        found.asked[part] = objects.prompts_asked(model, data, setting, part)
    if setting.get("seeds") == "twice":
        found.seeded = _differing_by_seed(trainer_class, model, setting, config, data)
    with _fixed_completions(data, found, config.num_generations), _watched_tables(found):
        given = copy.deepcopy({name: value for name, value in vars(config).items() if isinstance(value, dict)})
        trainer = _build(trainer_class, model, setting, config, data, found)
        found.changed = {name: (value, vars(config)[name]) for name, value in given.items() if vars(config)[name] != value}
        if setting.get("evaluation") == "before":
            trainer.evaluate()
        with _watched_steps(trainer, found, whole):
            trainer.train()
        found.logs = [dict(entry) for entry in trainer.state.log_history if "loss" in entry]
        if setting.get("evaluation") == "after":
            trainer.evaluate()
    if setting.get("resumed"):
        _resume(trainer_class, model, setting, config, data, found, whole)
    return found


def _build(
    trainer_class: type,
    model: TinyModel,
    setting: Mapping[str, Any],
    config: Any,
    data: Data,
    found: Recording,
    fill: bool = True,
) -> Any:
    """
    Args:
        fill: give an adapter that the trainer makes weights that do something.
    """
    import transformers

    policy, adapter = objects.policy(model, setting), objects.adapter_config(setting)
    words = objects.tokenizer(model, setting)
    extra: dict[str, Any] = {} if adapter is None else {"peft_config": adapter}
    if setting.get("evaluation"):
        extra["eval_dataset"] = data.dataset(objects.prompt_count(setting, "evaluation"), "evaluation")
    if setting.get("rewards") == "shared_class":
        extra["reward_processing_classes"] = words
    dataset: Any = data.dataset(objects.prompt_count(setting, "training"))
    if setting.get("data") in ("iterable", "none"):
        dataset = dataset.to_iterable_dataset() if setting["data"] == "iterable" else None
    functions = [_watched(each, found) for each in reward_functions(setting.get("rewards", "letters"))]
    trainer = _recording(trainer_class, found)(
        model=policy,
        reward_funcs=functions if len(functions) > 1 else functions[0],
        args=config,
        train_dataset=dataset,
        processing_class=words,
        **extra,
    )
    if setting.get("adapter") == "peft_config" and fill:
        objects.fill_adapter(trainer.model)
    trainer.remove_callback(transformers.PrinterCallback)
    plain = (int, float, str, bool, list, tuple, dict, type(None))
    found.arguments = {name: value for name, value in vars(trainer.args).items() if isinstance(value, plain)}
    return trainer


def _differing_by_seed(
    trainer_class: type, model: TinyModel, setting: Mapping[str, Any], config: Any, data: Data
) -> list[str]:
    """Trainable weights that differ between two trainers with one seed, made in different states of the generators."""
    import torch

    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        trainer = _build(trainer_class, model, setting, config, data, Recording({}), fill=False)
        made.append({name: each.detach().cpu() for name, each in trainer.model.named_parameters() if each.requires_grad})
    return [name for name, weight in made[0].items() if not torch.equal(weight, made[1][name])]


@contextlib.contextmanager
def _watched_tables(found: Recording) -> Iterator[None]:
    """Keep what is given to the function that prints completions, instead of printing it."""
    from trl.trainer import grpo_trainer

    name = "print_prompt_completions_sample"
    if not hasattr(grpo_trainer, name):
        yield
        return
    printed = getattr(grpo_trainer, name)

    def keep(prompts: Any, completions: Any, rewards: Any, *args: Any, **kwargs: Any) -> None:
        by_function = {each: list(values) for each, values in rewards.items()} if isinstance(rewards, dict) else {}
        found.tables.append((list(prompts), list(completions), by_function))

    setattr(grpo_trainer, name, keep)
    try:
        yield
    finally:
        setattr(grpo_trainer, name, printed)


def _resume(
    trainer_class: type,
    model: TinyModel,
    setting: Mapping[str, Any],
    config: Any,
    data: Data,
    found: Recording,
    whole: Whole | None,
) -> None:
    """Train on from the checkpoint; what happens takes the place of what happened then, if it was between generations.

    Completions are those that the uninterrupted training had.
    """
    steps = int(config.save_steps)
    again = Recording({}, asked=found.asked)
    kept = found.steps[steps - 1].micro_batches
    training = [each for each in found.micro_batches if not each.evaluation]
    generations = 1 + training[kept - 1].generation
    again.generated = found.generated[:generations]
    with _fixed_completions(data, again, config.num_generations):
        trainer = _build(trainer_class, model, setting, config, data, again)
        with _watched_steps(trainer, again, whole):
            trainer.train(resume_from_checkpoint=os.path.join(config.output_dir, f"checkpoint-{steps}"))
    if setting["resumed"] != "between_generations":
        return
    logs = [dict(entry) for entry in trainer.state.log_history if "loss" in entry]
    for each in again.steps:
        each.micro_batches += kept
    found.prompts_before_resuming = [each.prompts for each in found.generated]
    found.generated = again.generated
    found.micro_batches = training[:kept] + again.micro_batches
    found.steps = found.steps[:steps] + again.steps
    found.logs = logs


@contextlib.contextmanager
def _fixed_completions(data: Data, found: Recording, group: int) -> Iterator[None]:
    """Let generation run for one token, then put the fixed completions in place of what it drew."""
    import torch
    from transformers.generation import GenerationMixin

    generate: Callable[..., torch.Tensor] = GenerationMixin.generate
    rank = int(os.environ.get("RANK", "0"))

    def fixed(self: Any, inputs: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        prompts = inputs if inputs is not None else kwargs["input_ids"]
        masks = kwargs.get("attention_mask")
        config = copy.deepcopy(kwargs["generation_config"])
        wanted = config.max_new_tokens
        config.max_new_tokens = 1
        with _prepared_config() as prepared:
            drawn = generate(self, inputs, **{**kwargs, "generation_config": config})
        arguments = {name: getattr(prepared[0], name, None) for name in _GENERATION}
        arguments["max_new_tokens"] = wanted
        width = prompts.shape[1]
        call = sum(each.evaluation == found.in_evaluation for each in found.generated)
        one = Generated([], [], arguments, evaluation=found.in_evaluation)
        size = group
        if found.in_evaluation:
            size = found.arguments.get("num_generations_eval") or group
        padding = config.pad_token_id or 0
        for row, ids in enumerate(drawn[:, :width].tolist()):
            if masks is not None:
                mask = masks[row * len(masks) // len(drawn)].tolist()  # a prompt may come back as several rows
                prompt = [token for token, real in zip(ids, mask, strict=True) if real]
            else:
                prompt = [token for token in ids if token != padding]
            one.prompts.append(prompt)
            one.completions.append(data.completion(prompt, (rank * len(drawn) + row) % size, call))
        found.generated.append(one)
        longest = max(map(len, one.completions))
        rows = [[*each, *[padding] * (longest - len(each))] for each in one.completions]
        return torch.cat([drawn[:, :width], torch.tensor(rows, dtype=drawn.dtype, device=drawn.device)], 1)

    GenerationMixin.generate = fixed
    try:
        yield
    finally:
        GenerationMixin.generate = generate


_GENERATION = ("do_sample", "eos_token_id", "min_p", "repetition_penalty", "temperature", "top_k", "top_p")


@contextlib.contextmanager
def _prepared_config() -> Iterator[list[Any]]:
    """The generation config as a call of ``generate`` uses it, with the model's own settings merged."""
    from transformers.generation import GenerationMixin

    processors = GenerationMixin._get_logits_processor
    found: list[Any] = []

    def seen(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(copy.copy(generation_config))
        return processors(self, generation_config, *args, **kwargs)

    GenerationMixin._get_logits_processor = seen
    try:
        yield found
    finally:
        GenerationMixin._get_logits_processor = processors


def _watched(function: Callable[..., Any], found: Recording) -> Callable[..., Any]:
    """The function, whose arguments are kept with the newest generation."""
    import functools

    def keep(kwargs: Mapping[str, Any]) -> None:
        found.generated[-1].rewarded[name_of(function)] = {
            name: [content(each) if name != "target" else int(each) for each in kwargs[name]]
            for name in ("prompts", "completions", "target")
            if name in kwargs
        }

    if not hasattr(function, "__name__"):  # it must reach the trainer as it is
        return _watched_object(function, keep)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        keep(kwargs)
        return function(*args, **kwargs)

    return watched


def _watched_object(function: Callable[..., Any], keep: Callable[[Mapping[str, Any]], None]) -> Callable[..., Any]:
    """A partial, or an object, without ``__name__`` as before."""
    import functools

    def call(completions: Sequence[Any], **kwargs: Any) -> Any:
        keep({"completions": completions, **kwargs})
        return function(completions=completions, **kwargs)

    if isinstance(function, functools.partial):
        call.__name__ = name_of(function)
        return functools.partial(call)
    return type(type(function).__name__, (), {"__call__": lambda self, **kwargs: call(**kwargs)})()


def _recording(trainer_class: type, found: Recording) -> type:
    import torch

    methods = ("_get_per_token_logps_and_entropies", "_get_per_token_logps")
    method = next((name for name in methods if hasattr(trainer_class, name)), "")

    class Recording(trainer_class):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            batch = MicroBatchRecord(-1, [], evaluation=found.in_evaluation)
            found.micro_batches.append(batch)
            if isinstance(inputs, Mapping) and "completion_ids" in inputs:
                _keep(inputs, batch)
            try:
                return super().compute_loss(model, inputs, *args, **kwargs)
            finally:
                batch.generation = len(found.generated) - 1  # 0.14 samples in here

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            found.in_evaluation = True
            try:
                logs = super().evaluate(*args, **kwargs)
            finally:
                found.in_evaluation = False
            logged = [entry for entry in self.state.log_history if "eval_loss" in entry]
            found.evaluations.append((len(found.steps), dict(logged[-1]) if logged else dict(logs)))
            found.returned.append(dict(logs))
            return logs

    def scored(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores = getattr(super(Recording, self), method)(*args, **kwargs)
        both = scores if isinstance(scores, tuple) else (scores, None)
        if torch.is_grad_enabled() and both[0].requires_grad and found.micro_batches:
            batch = found.micro_batches[-1]
            for name, value in zip(("logprobs", "entropies"), both, strict=False):
                if value is not None:
                    batch.values.setdefault(name, []).extend(value.detach().float().cpu().tolist())
        return scores

    if method:
        setattr(Recording, method, scored)
    Recording.__name__ = trainer_class.__name__
    return Recording


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
    batch.values["completion_mask"] = inputs["completion_mask"].long().cpu().tolist()


@contextlib.contextmanager
def _watched_steps(trainer: Any, found: Recording, whole: Whole | None) -> Iterator[None]:
    """Keep gradients before, and weights after each step of the optimizer."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from transformers import TrainerCallback

    kept: dict[str, torch.Tensor] = {}

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        kept.clear()
        for name, parameter in trainer.model.named_parameters() if whole is None else ():
            if parameter.grad is not None:
                kept[name] = parameter.grad.detach().float().cpu().clone()

    class AfterSteps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights = _trained_weights(trainer) if whole is None else whole(trainer)
            count = sum(not each.evaluation for each in found.micro_batches)
            found.steps.append(StepRecord(count, dict(kept), weights))

    callback = AfterSteps()
    trainer.callback_handler.callbacks.insert(0, callback)  # before one that changes or saves something
    handle = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()
        trainer.remove_callback(callback)


def _trained_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().float().cpu().clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
