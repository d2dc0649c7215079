"""Axolotl's trainers as the conformance suite sees them; its DPO trainer is a subclass of TRL's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.dpo.adapter import DPOAdapter
from pytest_trlcompat.conformance.sft.adapter import SFTAdapter

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["DPO", "SFT"]


class DPO(DPOAdapter):
    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        policy = model.new_model().eval()
        return policy, copy.deepcopy(policy)


class SFT(SFTAdapter):
    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        return (model.new_model().eval(),)
