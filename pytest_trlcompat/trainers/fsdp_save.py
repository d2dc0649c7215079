"""Cure of ``fsdp-sharded-save``: ``save_model`` writes the policy under any type of state dict.

Under FSDP ``Trainer.save_model`` writes where the plugin's state dict type is ``FULL_STATE_DICT``, and otherwise
returns without a word and without a file. Checkpoints are complete all the same: their shards are written elsewhere.
The cure sets that type while ``save_model`` runs.

Imports torch, and of this package ``fsdp_ref_model``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.distributed.fsdp import StateDictType

from pytest_trlcompat.trainers._cure import Cure
from pytest_trlcompat.trainers.fsdp_ref_model import fsdp_version

__all__ = ["FSDPSaveMixin", "full_state_dict"]


@contextmanager
def full_state_dict(accelerator: Any) -> Iterator[None]:
    """Let ``accelerator`` ask for whole state dicts while the context lasts. Does nothing without FSDP."""
    if fsdp_version(accelerator) is None:
        yield
        return
    plugin = accelerator.state.fsdp_plugin
    before, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
    try:
        yield
    finally:
        plugin.state_dict_type = before


class FSDPSaveMixin(Cure):
    """Lets ``save_model`` and ``push_to_hub`` of any ``transformers.Trainer`` write the whole model under FSDP.

    Gathers it as ``FULL_STATE_DICT`` does; checkpoints stay as the state dict type has them. Does nothing where the
    type is ``FULL_STATE_DICT`` already.
    """

    accelerator: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # A checkpoint is the one internal call that names its folder; its shards are written with the optimizer's.
        checkpoint = _internal_call and output_dir is not None
        gathered: AbstractContextManager[None] = nullcontext() if checkpoint else full_state_dict(self.accelerator)
        upstream: Any = super()
        with gathered:
            upstream.save_model(output_dir, _internal_call)
