"""The corrected GRPO trainer: TRL's own with every cure for it in front. Imports the stack."""

from __future__ import annotations

import functools
from typing import Any

import trl

from pytest_trlcompat.trainers.device_map import OneDevicePerRankMixin
from pytest_trlcompat.trainers.fsdp_generation import FSDPGenerationMixin
from pytest_trlcompat.trainers.fsdp_gradients import FSDPGradientsMixin
from pytest_trlcompat.trainers.fsdp_ref_model import FSDPReferenceModelMixin
from pytest_trlcompat.trainers.fsdp_save import FSDPSaveMixin
from pytest_trlcompat.trainers.fsdp_sync_ref_model import FSDPSyncRefModelMixin
from pytest_trlcompat.trainers.logits_to_keep import LogitsToKeepMixin

__all__ = ["GRPOTrainer"]


class GRPOTrainer(
    LogitsToKeepMixin,
    FSDPSyncRefModelMixin,
    FSDPReferenceModelMixin,
    FSDPGenerationMixin,
    FSDPGradientsMixin,
    FSDPSaveMixin,
    OneDevicePerRankMixin,
    trl.GRPOTrainer,
):
    """``trl.GRPOTrainer`` of whichever release is installed, from 0.14.0 on, with known bugs cured.

    Takes what ``trl.GRPOTrainer`` takes, is one, and behaves like it elsewhere.

    =============================== ============================ ==================================================
    cure                            upstream                     does nothing
    =============================== ============================ ==================================================
    :mod:`.logits_to_keep`          trl 2770                     from trl 0.20.0; from 0.16.0 where the model honours
                                                                 ``logits_to_keep``
    :mod:`.fsdp_ref_model`          trl 3348                     from trl 0.18.0 (FSDP1), 0.29.0 (FSDP2)
    :mod:`.fsdp_generation`         trl 2796                     from trl 0.18.0
    :mod:`.fsdp_gradients`          none found                   outside of FSDP1 ``no_shard``
    :mod:`.fsdp_sync_ref_model`     none found                   outside of FSDP1
    :mod:`.fsdp_save`               transformers 30491           where the state dict type is FULL_STATE_DICT
    :mod:`.device_map`              none found                   before trl 0.26.0
    =============================== ============================ ==================================================
    """

    @functools.wraps(trl.GRPOTrainer.__init__)  # type: ignore[misc] # the stack is Any where it is not installed
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
