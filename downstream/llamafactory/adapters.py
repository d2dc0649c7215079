"""LlamaFactory's trainers as the conformance suite sees them: how their batches are read, and what arguments say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.dpo.adapter import DPOAdapter
from pytest_trlcompat.conformance.sft.adapter import SFTAdapter
from pytest_trlcompat.conformance.supervised.records import Read

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["DPO", "SFT"]

_IGNORED = -100
_NAMES = {
    "pref_beta": "beta",
    "pref_loss": "loss_type",
    "pref_ftx": "rpo_alpha",
    "dpo_label_smoothing": "label_smoothing",
    "ld_alpha": "ld_alpha",
}
"""LlamaFactory's arguments of a preference loss, and TRL's of the same meaning, by the documentation of both."""


@dataclasses.dataclass
class DPO(DPOAdapter):
    """
    Attributes:
        given: arguments of LlamaFactory.
        other: the reference model, which LlamaFactory leaves in half precision.
    """

    given: Mapping[str, Any]
    other: TinyModel

    def read(self, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Read:
        """As TRL's newer batches, but that labels say which tokens are the completion's."""
        return super().read({**inputs, "completion_mask": (inputs["labels"] != _IGNORED).int()}, arguments)

    def settings(
        self,
        arguments: Mapping[str, Any],
        conventions: Conventions,
        world_size: int,
        models: tuple[torch.nn.Module, ...],
    ) -> reference.PreferenceSettings:
        own = {name: self.given[key] for key, name in _NAMES.items() if key in self.given}
        return super().settings({"loss_type": "sigmoid", **arguments, **own}, conventions, world_size, models)

    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        return _loaded(model), _loaded(self.other).half()


class SFT(SFTAdapter):
    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        return (_loaded(model),)


def _loaded(model: TinyModel) -> torch.nn.Module:
    """As LlamaFactory loads it where neither ``bf16`` nor ``fp16`` is asked for: in half precision, and then what is
    trained in float32."""
    return model.new_model().half().float().eval()
