"""Is the reference model placed and sharded like the policy?

Known bugs that it catches: trl 3348, of a reference model that stays whole and on the CPU under FSDP. Imports torch,
and of this package the modules with an underscore.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pytest_trlcompat.checks._models import devices, sharding, unwrapped
from pytest_trlcompat.checks._ranks import CheckError, together

__all__ = ["check_reference_model"]


def check_reference_model(ref_model: nn.Module, policy: nn.Module) -> dict[str, Any]:
    """The reference model is on the policy's device, shared among ranks as the policy is, and in eval mode.

    Collective where there are several ranks, if only to agree.

    Args:
        ref_model: wrapped or not, sharded or not.
        policy: as training has it, wrapped and sharded.

    Returns:
        ``devices``, ``sharding`` (such as ``"fsdp1 FULL_SHARD"``, ``"zero3"``, ``"none"``) and ``dtypes`` of the
        reference model, ``policy_dtypes``, and ``trainable``, the number of its parameters that require a gradient;
        types and gradients may differ on purpose, so they are reported and not judged.

    Raises:
        CheckError: on every rank, with what was found of both.
    """
    with together("the reference model"):
        found = {"devices": devices(ref_model), "sharding": sharding(ref_model), "dtypes": _dtypes(ref_model)}
        wanted = {"devices": devices(policy), "sharding": sharding(policy)}
        problems = [
            f"{kind}: {_said(found[kind])} instead of {_said(wanted[kind])}"
            for kind in wanted
            if found[kind] != wanted[kind]
        ]
        if any(module.training for module in unwrapped(ref_model).modules()):  # DeepSpeed's engine keeps its own flag
            problems.append("it is in training mode, so dropout is on")
        trainable = sum(parameter.requires_grad for parameter in ref_model.parameters())
        if problems:
            raise CheckError(
                "expected a reference model placed and sharded like the policy, but " + "; ".join(problems) + ". "
                "Prepare it as the policy is prepared before training (pytest_trlcompat.trainers.GRPOTrainer does)"
            )
    return {**found, "policy_dtypes": _dtypes(policy), "trainable": trainable}


def _dtypes(model: nn.Module) -> list[str]:
    return sorted({str(parameter.dtype) for parameter in model.parameters()})


def _said(found: Any) -> str:
    return found if isinstance(found, str) else ", ".join(found)
