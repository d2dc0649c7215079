"""Train briefly with GRPO or RLOO and a setting, and record everything that the reference computes too.

Runs inside a rank. :mod:`~pytest_trlcompat.conformance.grpo.watching` records what a trainer does not show from
outside.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.grpo import environments, objects, tools
from pytest_trlcompat.conformance.grpo.configs import calls_of_a_generation, config_of, known_part
from pytest_trlcompat.conformance.grpo.methods import GRPO, Method
from pytest_trlcompat.conformance.grpo.records import Generated, Recording
from pytest_trlcompat.conformance.grpo.sampling import Data
from pytest_trlcompat.conformance.grpo.watching import (
    fixed_completions,
    watched_function,
    watched_tables,
    watched_trainer,
)
from pytest_trlcompat.conformance.training import Whole, watched_steps

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["joined", "record"]


def record(
    trainer_class: type,
    model: TinyModel,
    setting: Mapping[str, Any],
    seed: int = 0,
    whole: Whole | None = None,
    method: Method = GRPO,
) -> Recording:
    """Train, and evaluate and resume where the setting says so.

    Args:
        trainer_class: TRL's ``GRPOTrainer`` or ``RLOOTrainer``, or a subclass.
        setting: fields of the config, and values of :data:`~pytest_trlcompat.conformance.grpo.configs.AXES`.
        seed: of prompts and completions.
        whole: gathers the trained weights of a trainer, by their names in the bare model, where a strategy shards
            them; then no gradients are recorded. Called on every rank.
    """
    import trl

    setting = known_part(trl, setting, method)
    config = config_of(trl, setting, method)
    recording = Recording({})
    data = objects.data_of(model, setting, seed, config.max_completion_length)
    for part in ("training", "evaluation"):
        recording.asked[part] = objects.prompts_asked(model, data, setting, part)
    if setting.get("seeds") == "twice":
        recording.seeded = _differing_by_seed(trainer_class, model, setting, config, data)
    with fixed_completions(data, recording, config.num_generations), watched_tables(recording, method):
        # A trainer has to leave the dictionaries as they are that a user has given it.
        dictionaries = copy.deepcopy({name: value for name, value in vars(config).items() if isinstance(value, dict)})
        trainer = _build(trainer_class, model, setting, config, data, recording)
        recording.changed = {
            name: (value, vars(config)[name]) for name, value in dictionaries.items() if vars(config)[name] != value
        }
        if setting.get("evaluation") == "before":
            trainer.evaluate()
        with watched_steps(trainer, recording, whole):
            trainer.train()
        recording.logs = [dict(entry) for entry in trainer.state.log_history if "loss" in entry]
        if setting.get("evaluation") == "after":
            trainer.evaluate()
    if setting.get("resumed"):
        _resume(trainer_class, model, setting, config, data, recording, whole)
    return joined(recording, calls_of_a_generation(trl, config.gradient_accumulation_steps))


def joined(recording: Recording, calls: int) -> Recording:
    """The recording, in which ``calls`` consecutive calls of ``generate`` in training become one generation."""
    if calls == 1:
        return recording
    place_of, generated, count = [], list[Generated](), 0
    for call in recording.generated:
        if call.evaluation or count % calls == 0:
            generated.append(call)
        else:
            first = next(earlier for earlier in reversed(generated) if not earlier.evaluation)
            first.prompts += call.prompts
            first.completions += call.completions
            for name, columns in call.rewarded.items():
                for column, values in columns.items():
                    first.rewarded[name][column] += values
        count += not call.evaluation
        place_of.append(
            max(number for number, earlier in enumerate(generated) if earlier.evaluation == call.evaluation)
        )
    recording.generated = generated
    for batch in recording.micro_batches:
        batch.generation = place_of[batch.generation]
    before = recording.prompts_before_resuming
    starts = range(0, len(before), calls)
    recording.prompts_before_resuming = [list(chain(*before[start : start + calls])) for start in starts]
    return recording


def _build(
    trainer_class: type,
    model: TinyModel,
    setting: Mapping[str, Any],
    config: Any,
    data: Data,
    recording: Recording,
    fill: bool = True,
) -> Any:
    """
    Args:
        fill: give an adapter that the trainer makes weights that change the model's output.
    """
    import transformers

    policy, adapter = objects.policy(model, setting), objects.adapter_config(setting)
    processing_class = objects.tokenizer(model, setting)
    extra: dict[str, Any] = {} if adapter is None else {"peft_config": adapter}
    if setting.get("evaluation"):
        extra["eval_dataset"] = data.dataset(objects.prompt_count(setting, "evaluation"), "evaluation")
    if setting.get("rewards") in ("compiled_model", "shared_class"):  # a compiled model needs it
        extra["reward_processing_classes"] = processing_class
    if data.tools == "calls":
        extra["tools"] = [tools.tool(recording.tool_calls.append)]
    elif data.tools:
        extra["environment_factory"] = environments.factory(data.tools, recording.tool_calls.append)
    dataset: Any = data.dataset(objects.prompt_count(setting, "training"))
    if setting.get("data") in ("iterable", "list", "none"):
        other = {"iterable": dataset.to_iterable_dataset, "list": dataset.to_list}.get(setting["data"], lambda: None)
        dataset = other()
    functions = [watched_function(function, recording) for function in objects.rewards_of_trainer(model, setting)]
    trainer = watched_trainer(trainer_class, recording)(
        model=policy,
        reward_funcs=functions if len(functions) > 1 else functions[0],
        args=config,
        train_dataset=dataset,
        processing_class=processing_class,
        **extra,
    )
    if setting.get("adapter") in objects.NEW_ADAPTERS and fill:
        objects.fill_adapter(trainer.model)
    trainer.remove_callback(transformers.PrinterCallback)
    plain = (int, float, str, bool, list, tuple, dict, type(None))
    recording.arguments = {name: value for name, value in vars(trainer.args).items() if isinstance(value, plain)}
    return trainer


def _differing_by_seed(
    trainer_class: type, model: TinyModel, setting: Mapping[str, Any], config: Any, data: Data
) -> list[str]:
    """Trainable weights that differ between two trainers with one seed, built in different states of the generator."""
    import torch

    weights_by_seed = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        trainer = _build(trainer_class, model, setting, config, data, Recording({}), fill=False)
        weights_by_seed.append(
            {
                name: parameter.detach().cpu()
                for name, parameter in trainer.model.named_parameters()
                if parameter.requires_grad
            }
        )
    return [name for name, weight in weights_by_seed[0].items() if not torch.equal(weight, weights_by_seed[1][name])]


def _resume(
    trainer_class: type,
    model: TinyModel,
    setting: Mapping[str, Any],
    config: Any,
    data: Data,
    recording: Recording,
    whole: Whole | None,
) -> None:
    """Resume from the checkpoint; between generations, the resumed steps replace those that were recorded after it.

    Completions are the same as in the uninterrupted training.
    """
    steps = int(config.save_steps)
    again = Recording({}, asked=recording.asked)
    trained_before = recording.steps[steps - 1].micro_batches
    training = [batch for batch in recording.micro_batches if not batch.evaluation]
    generations = 1 + training[trained_before - 1].generation
    # Completions depend on how many calls there were before.
    again.generated = recording.generated[:generations]
    with fixed_completions(data, again, config.num_generations):
        trainer = _build(trainer_class, model, setting, config, data, again)
        with watched_steps(trainer, again, whole):
            trainer.train(resume_from_checkpoint=os.path.join(config.output_dir, f"checkpoint-{steps}"))
    if setting["resumed"] != "between_generations":
        return
    logs = [dict(entry) for entry in trainer.state.log_history if "loss" in entry]
    for step in again.steps:
        step.micro_batches += trained_before
    recording.prompts_before_resuming = [call.prompts for call in recording.generated]
    recording.generated = again.generated
    recording.micro_batches = training[:trained_before] + again.micro_batches
    recording.steps = recording.steps[:steps] + again.steps
    recording.logs = logs
