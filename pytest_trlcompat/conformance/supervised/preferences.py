"""The base of adapters of trainers with a reference model: DPO's and KTO's.

Runs inside a rank.
"""

from __future__ import annotations

import abc
import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from pytest_trlcompat.conformance.adapter import exported
from pytest_trlcompat.conformance.architectures import ARCHITECTURES
from pytest_trlcompat.conformance.comparison import Difference
from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.supervised import evaluating
from pytest_trlcompat.conformance.supervised.evaluating import EVALUATION, GIVEN, built, evaluation_argument
from pytest_trlcompat.conformance.supervised.hooks import AXES, SupervisedHooks
from pytest_trlcompat.conformance.supervised.records import Recording
from pytest_trlcompat.conformance.training import world_size

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["PREFERENCE_AXES", "PreferenceAdapter", "auxiliary_weight", "with_dropout"]

PREFERENCE_AXES: Mapping[str, tuple[Any, ...]] = {
    "reference": ("", "model"),
    "dropout": ("", "attention", "adapter"),
    "model": (*AXES["model"], *ARCHITECTURES),
    "evaluation": EVALUATION,
    "metrics": (False, True),
    "given": GIVEN,
    "adapter": (*AXES["adapter"], "peft_parameters"),
}
"""Axes of every such adapter. ``reference="model"``: the user gives a reference model with other weights; ``dropout``:
the model's config, or that of its adapter, asks for dropout, which ``disable_dropout`` is documented to switch off;
``metrics``: the user gives a ``compute_metrics``, which must get the logits of tokens, and token ids as targets;
``adapter="peft_parameters"``: the policy has an adapter of the stacked matrices of experts."""
_DROPPED = 0.5
_OF_TOKENS = "of_tokens"


class PreferenceAdapter(SupervisedHooks):
    """A trainer with a reference model, which the user may give.

    Attributes:
        own_state: the first release of TRL in which a policy that comes with an adapter is its own reference.
    """

    own_state: ClassVar[Version]

    @abc.abstractmethod
    def dataset(self, model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> Any:
        """The rows of ``training`` or ``evaluation`` as a user has them."""

    @abc.abstractmethod
    def tokenizer(self, model: TinyModel, setting: Mapping[str, Any]) -> Any:
        """The processing class."""

    def config(self, trl: Any, setting: Mapping[str, Any]) -> Any:
        return super().config(trl, {**_on_own_device(exported(trl, self.names[0])), **setting})

    def build(
        self, trainer_class: type, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, fill: bool
    ) -> Any:
        adapter = objects.adapter_config(setting)
        extra: dict[str, Any] = {} if adapter is None else {"peft_config": adapter}
        policy = with_dropout(objects.policy(model, setting), adapter, setting)
        extra |= evaluation_argument(setting, lambda: self.dataset(model, setting, seed, "evaluation"))
        if setting.get("reference"):
            extra["ref_model"] = _other(model)
        if setting.get("metrics"):
            extra["compute_metrics"] = _metrics
        arguments: dict[str, Any] = {
            "model": policy,
            "args": config,
            "train_dataset": self.dataset(model, setting, seed, "training"),
            self.words_argument(trainer_class): self.tokenizer(model, setting),
            **extra,
        }
        trainer = built(trainer_class, arguments, setting)
        if setting.get("adapter") in objects.NEW_ADAPTERS and fill:
            objects.fill_adapter(trainer.model)
        return trainer

    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        policy, compared = objects.untrained(model, setting)
        if (
            setting.get("adapter") in ("peft_model", "peft_parameters")
            and Version(metadata.version("trl")) < self.own_state
        ):
            compared = objects.policy(model, {**setting, "adapter": ""}, whole=True).eval()
        if setting.get("reference"):
            compared = _other(model).eval()
        return policy, compared

    def evaluate(self, trainer: Any, model: TinyModel, setting: Mapping[str, Any], seed: int) -> None:
        evaluating.evaluate(trainer, setting, lambda: self.dataset(model, setting, seed, "evaluation"))

    def extra_differences(
        self,
        recordings: Sequence[Recording],
        models: tuple[torch.nn.Module, ...],
        model: TinyModel,
        setting: Mapping[str, Any],
        seed: int,
    ) -> Iterator[Difference]:
        """What differs in the arguments of ``compute_metrics``."""
        for number, returned in enumerate(recordings[0].returned if setting.get("metrics") else ()):
            seen = returned.get(f"eval_{_OF_TOKENS}")
            if seen != 1.0:
                description = ["none" if seen is None else "other shapes"]
                where = f"evaluation {number}"
                yield Difference("metrics[predictions]", where, ["logits of tokens"], description, math.inf, 0.0)

    def after_step(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> Callable[[Any, int], None] | None:
        from pytest_trlcompat import reference

        assert isinstance(settings, (reference.PreferenceSettings, reference.KTOSettings))
        return reference.synchronised(models[1], settings)


def auxiliary_weight(policy: Any, arguments: Mapping[str, Any]) -> float:
    """The weight of the auxiliary loss of a mixture of experts: the argument, else the model's; 0 for other models."""
    if not hasattr(policy.config, "output_router_logits"):
        return 0.0
    declared = policy.config.router_aux_loss_coef if policy.config.output_router_logits else 0.0
    coefficient = arguments.get("router_aux_loss_coef")
    return float(declared if coefficient is None else coefficient)


def _on_own_device(trainer_class: type) -> dict[str, Any]:
    """Fields of a config that keep each rank's reference model off device 0; see OneDevicePerRankMixin."""
    modules = {sys.modules.get(base.__module__) for base in trainer_class.__mro__}
    if world_size() > 1 and any(hasattr(module, "create_model_from_path") for module in modules):
        return {"model_init_kwargs": {"device_map": None}}
    return {}


def with_dropout(policy: Any, adapter: Any, setting: Mapping[str, Any]) -> Any:
    """The policy as a user passes it, with the dropout that the axis asks for."""
    if setting.get("dropout") == "adapter":
        adapter.lora_dropout = _DROPPED
    elif setting.get("dropout"):
        policy.config.attention_dropout = _DROPPED
        # Modules have read the config when they were built.
        for module in policy.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = _DROPPED
    return policy


def _metrics(prediction: Any) -> dict[str, float]:
    """A ``compute_metrics``: 1 where it gets "predictions of the model" and "targets to be matched", by token."""
    logits, targets = prediction.predictions, prediction.label_ids
    shapes = [getattr(array, "shape", ()) for array in (logits, targets)]
    is_right = len(shapes[0]) == 3 and shapes[0][:2] == shapes[1] and bool((targets > 0).any())
    return {_OF_TOKENS: float(is_right)}


def _other(model: TinyModel) -> Any:
    """The same model with other weights."""
    import torch

    other_model = copy.deepcopy(model.new_model())
    with torch.no_grad():
        for parameter in other_model.parameters():
            parameter.mul_(0.8)
    return other_model
