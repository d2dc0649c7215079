"""What the tests of FSDP's cures share: its options, and what a rank says of a reference model."""

from __future__ import annotations

from typing import Any

from pytest_trlcompat import stack

INSTALLED = stack.installed()
FULL_SHARD = ("fsdp1", {"sharding_strategy": "FULL_SHARD"})
FLAT_PARAMETERS = ("fsdp1", {"sharding_strategy": "FULL_SHARD", "use_orig_params": False, "sync_module_states": False})
NO_SHARD = ("fsdp1", {"sharding_strategy": "NO_SHARD"})
CPU_OFFLOAD = ("fsdp1", {"sharding_strategy": "FULL_SHARD", "offload_params": True})
# Accelerate 1.6 refuses another state dict type with FSDP2.
FSDP2 = ("fsdp2", {"state_dict_type": "SHARDED_STATE_DICT"})


def describe(trainer: Any) -> dict[str, Any]:
    """The reference model as a rank sees it."""
    from pytest_trlcompat.trainers.fsdp.fsdp_ref_model import is_sharded

    ref_model, device = trainer.ref_model, trainer.accelerator.device
    parameters = list(ref_model.parameters())
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in parameters]
    return {
        "class": type(ref_model).__name__,
        "sharded": is_sharded(ref_model),
        "on_own_device": all(parameter.device == device for parameter in local),
        "devices": sorted({parameter.device.type for parameter in local}),
        "local": sum(parameter.numel() for parameter in local),
        "requires_grad": any(parameter.requires_grad for parameter in parameters),
        "training": any(module.training for module in ref_model.modules()),
    }
