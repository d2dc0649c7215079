"""Train briefly with PPO and a setting, and record everything that the reference computes too.

Runs inside a rank. What a trainer does not show from outside is recorded at the functions of its module that return
log-probabilities, values and scores, and whitened advantages; the rest as
:mod:`~pytest_trlcompat.conformance.on_policy.recording` says.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from pytest_trlcompat.conformance.on_policy import recording as on_policy
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording
from pytest_trlcompat.conformance.ppo import objects
from pytest_trlcompat.conformance.ppo.expected import Untrained

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["AXES", "record", "unknown"]

AXES: Mapping[str, tuple[Any, ...]] = {
    "policy": ("", "checkpointing", "generation_settings", "peft_model"),
    "given": ("", "collator", "no_train_dataset", "no_value_model", "peft_config", "peft_mapping"),
    "refused": (False, True),
    "refused_naming": ("", "train_dataset", "value_model", "peft_config"),
}
"""What a setting may have in addition to fields of the config. ``policy``: its gradient checkpointing was switched on
before, its own generation config has a temperature and the like, or it comes with an adapter. ``given``: a collator of
the user's own; an argument left out that a training needs; ``peft_mapping``: a mapping in place of PEFT's config.
``refused``: as for other trainers."""


def unknown(setting: Mapping[str, Any]) -> list[str]:
    """Which :data:`AXES` of a setting this release does not know, or was not measured with."""
    if Version(metadata.version("trl")) < Version("0.12"):
        return [name for name in AXES if setting.get(name)]
    adapts = setting.get("given") in ("peft_config", "peft_mapping")
    if adapts and "peft_config" not in inspect.signature(inspect.unwrap(_constructor())).parameters:
        return ["given"]
    return []


def _constructor() -> Any:
    return vars(objects.trainer_class("upstream"))["__init__"]


def record(
    subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int = 0
) -> tuple[OnPolicyRecording, Untrained]:
    """Train.

    Args:
        setting: fields of the config, and :data:`AXES`; ``stop_token="none"`` means none.
        seed: of queries and responses.

    Returns:
        The recording, and the models as they were before.
    """
    values = on_policy.arguments_of({name: value for name, value in setting.items() if name not in AXES})
    on_policy.seeded()
    # Releases before 0.17 have num_mini_batches times as many rows in a batch.
    rows = on_policy.rows_of_batches() * values.get("num_mini_batches", 1)
    collated: list[int] = []
    arguments = {
        "train_dataset": on_policy.queries(model.words, rows, seed),
        **_arguments(model, setting, collated),
    }
    trainer = objects.build_trainer(subject, model, arguments=arguments, **values)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    # PPOv2 calls it ref_policy.
    reference_model = getattr(trainer, "ref_model", None) or trainer.ref_policy
    on_policy.move(reference_model, seed=3)
    models = (trained.policy, trained.value_model, trainer.reward_model, reference_model)
    before = Untrained(*(copy.deepcopy(module).cpu() for module in models))
    recording = on_policy.recording(trainer)
    recording.asked = {name: values[name] for name in ("run_name",) if name in values}
    with (
        on_policy.fixed_responses(model.words, recording, seed),
        _watched_functions(trainer, recording),
        on_policy.watched_training(trainer, trained, recording),
        on_policy.few_objects(),
    ):
        trainer.train()
    recording.logs = objects.logged(trainer)
    recording.collated = sum(collated) if setting.get("given") == "collator" else None
    return recording, before


def _arguments(model: TinyModel, setting: Mapping[str, Any], collated: list[int]) -> dict[str, Any]:
    """Arguments of the trainer that replace, or are added to, those of every training.

    Args:
        collated: the list to which the user's own collator appends the number of rows of each batch.
    """
    arguments: dict[str, Any] = {}
    policy, kind = setting.get("policy"), setting.get("given")
    if policy:
        arguments["model"] = objects.load_models(model).model
    if policy == "generation_settings":
        arguments["model"].generation_config.update(temperature=0.3, top_k=7, top_p=0.8, repetition_penalty=1.3)
    elif policy == "checkpointing":
        arguments["model"].gradient_checkpointing_enable()
    elif policy == "peft_model":
        from peft import get_peft_model

        arguments["model"] = get_peft_model(arguments["model"], objects.lora())
    if kind in ("no_train_dataset", "no_value_model"):
        arguments[kind.removeprefix("no_")] = None if kind == "no_train_dataset" else objects.OMITTED
    elif kind in ("peft_config", "peft_mapping"):
        arguments["peft_config"] = objects.lora() if kind == "peft_config" else {"r": 4}
    elif kind == "collator":
        arguments["data_collator"] = on_policy.collator(model.tokenizer, collated)
    return arguments


@contextlib.contextmanager
def _watched_functions(trainer: Any, recording: OnPolicyRecording) -> Iterator[None]:
    """Record the results of functions that the trainer's module calls by names in its own namespace."""
    import sys
    from unittest import mock

    import torch

    from pytest_trlcompat.trainers.curing.trl_ppo import ppo_trainer_class

    module = sys.modules[inspect.unwrap(ppo_trainer_class().train).__module__]
    expected = "logprobs"

    def log_softmax(logits: torch.Tensor, index: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal expected
        logprobs: torch.Tensor = originals["selective_log_softmax"](logits, index, *args, **kwargs)
        if torch.is_grad_enabled():
            recording.see("new_logprobs", logprobs)
        else:
            # For each part of a batch, the policy is called before the reference model.
            recording.see(expected, logprobs)
            expected = "reference_logprobs" if expected == "logprobs" else "logprobs"
        return logprobs

    def reward(model: Any, ids: torch.Tensor, pad: int, context_length: int) -> Any:
        outputs = originals["get_reward"](model, ids, pad, context_length)
        if model is trainer.reward_model:
            recording.see("scores", outputs[1].reshape(-1))
        else:
            # (R, L, 1): the value of a state stands at the last token of it, before the one that is sampled there.
            recording.see("values", outputs[0][:, context_length - 1 : -1].squeeze(-1))
        return outputs

    def whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
        whitened: torch.Tensor = originals["masked_whiten"](values, mask, shift_mean)
        # Where rewards are whitened, the first call of a batch is for them.
        if trainer.args.whiten_rewards and recording.of_batch("rewards", recording.batch) is None:
            recording.see("rewards", values)
            recording.see("whitened_rewards", whitened)
        else:
            recording.see("estimates", values)
            recording.see("advantages", whitened)
            recording.see("mask", mask)
        return whitened

    watched = {"selective_log_softmax": log_softmax, "get_reward": reward, "masked_whiten": whiten}
    originals = {name: getattr(module, name) for name in watched if hasattr(module, name)}
    with mock.patch.dict(vars(module), {name: watched[name] for name in originals}):
        yield
