"""Axolotl's trainers as the conformance suite sees them; its DPO trainer is a subclass of TRL's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.dpo.room import DPORoom
from pytest_trlcompat.conformance.sft.room import SFTRoom

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["DPO", "SFT"]


class DPO(DPORoom):
    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        policy = model.new_model().eval()
        return policy, copy.deepcopy(policy)


class SFT(SFTRoom):
    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        return (model.new_model().eval(),)
