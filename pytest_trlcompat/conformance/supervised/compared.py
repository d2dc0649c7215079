"""What rooms have in common whose trainers hold a policy to a reference model: DPO's and KTO's.

Runs inside a rank; imports the stack only inside functions.
"""

from __future__ import annotations

import abc
import copy
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from pytest_trlcompat.conformance.architectures import ARCHITECTURES
from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.supervised.room import AXES, Room
from pytest_trlcompat.conformance.training import world_size

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["COMPARED_AXES", "ComparedRoom", "auxiliary_weight", "with_dropout"]

COMPARED_AXES: Mapping[str, tuple[Any, ...]] = {
    "reference": ("", "model"),
    "dropout": ("", "attention", "adapter"),
    "model": (*AXES["model"], *ARCHITECTURES),
}
"""Axes of every such room. ``reference="model"``: a reference model of other weights is given; ``dropout``: the model's
config, or that of its adapter, asks for some, which ``disable_dropout`` says is not applied."""
_DROPPED = 0.5


class ComparedRoom(Room):
    """A trainer with a reference model, which its user may give.

    Attributes:
        own_state: the release of TRL from which on a policy that comes with an adapter is its own reference.
    """

    own_state: ClassVar[Version]

    @abc.abstractmethod
    def dataset(self, model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> Any:
        """The rows of ``training`` or ``evaluation`` as a user has them."""

    @abc.abstractmethod
    def tokenizer(self, model: TinyModel, setting: Mapping[str, Any]) -> Any:
        """The processing class."""

    def config(self, trl: Any, setting: Mapping[str, Any]) -> Any:
        return super().config(trl, {**_on_own_device(getattr(trl, self.names[0])), **setting})

    def build(
        self, trainer_class: type, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, fill: bool
    ) -> Any:
        adapter = objects.adapter_config(setting)
        extra: dict[str, Any] = {} if adapter is None else {"peft_config": adapter}
        policy = with_dropout(objects.policy(model, setting), adapter, setting)
        if setting.get("evaluation"):
            extra["eval_dataset"] = self.dataset(model, setting, seed, "evaluation")
        if setting.get("reference"):
            extra["ref_model"] = _other(model)
        trainer = trainer_class(
            model=policy,
            args=config,
            train_dataset=self.dataset(model, setting, seed, "training"),
            **{self.words_argument(trainer_class): self.tokenizer(model, setting)},
            **extra,
        )
        if setting.get("adapter") == "peft_config" and fill:
            objects.fill_adapter(trainer.model)
        return trainer

    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        policy, compared = objects.untrained(model, setting)
        if setting.get("adapter") == "peft_model" and Version(metadata.version("trl")) < self.own_state:
            compared = objects.policy(model, {**setting, "adapter": ""}, whole=True).eval()
        if setting.get("reference"):
            compared = _other(model).eval()
        return policy, compared

    def after_step(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> Callable[[Any, int], None] | None:
        from pytest_trlcompat import reference

        assert isinstance(settings, (reference.PreferenceSettings, reference.KTOSettings))
        return reference.synchronised(models[1], settings)


def auxiliary_weight(policy: Any, arguments: Mapping[str, Any]) -> float:
    """Of the auxiliary loss of a mixture of experts: the argument's, or what the model declares; 0 of another model."""
    if not hasattr(policy.config, "output_router_logits"):
        return 0.0
    declared = policy.config.router_aux_loss_coef if policy.config.output_router_logits else 0.0
    coefficient = arguments.get("router_aux_loss_coef")
    return float(declared if coefficient is None else coefficient)


def _on_own_device(trainer_class: type) -> dict[str, Any]:
    """Fields of a config that keep each rank's reference model off device 0; see OneDevicePerRankMixin."""
    modules = {sys.modules.get(each.__module__) for each in trainer_class.__mro__}
    if world_size() > 1 and any(hasattr(each, "create_model_from_path") for each in modules):
        return {"model_init_kwargs": {"device_map": None}}
    return {}


def with_dropout(policy: Any, adapter: Any, setting: Mapping[str, Any]) -> Any:
    """The policy as a user passes it, with the dropout of the axis."""
    if setting.get("dropout") == "adapter":
        adapter.lora_dropout = _DROPPED
    elif setting.get("dropout"):
        policy.config.attention_dropout = _DROPPED
        for module in policy.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = _DROPPED
    return policy


def _other(model: TinyModel) -> Any:
    """A model of other weights."""
    import torch

    found = copy.deepcopy(model.new_model())
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(0.8)
    return found
