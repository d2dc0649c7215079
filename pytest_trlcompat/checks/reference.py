"""Is the reference model placed, shared and gathered like the policy?

Known bugs that it catches: trl 3348, of a reference model that stays whole and on the CPU under FSDP; one that is a
single unit under FSDP, so that each forward gathers all of it. Imports torch, and of this package the modules with an
underscore.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pytest_trlcompat.checks._models import devices, gathered_share, is_engine, sharding, unwrapped
from pytest_trlcompat.checks._ranks import CheckError, OddError, together

__all__ = ["check_reference_model"]

_MORE = 1.5
"""Times the policy's share of a model that is gathered at once, beyond which a reference model gathers too much."""
_WHOLE = 0.99
"""Share beyond which a model is gathered whole: too much wherever the policy is not, however few its layers are."""


def check_reference_model(ref_model: nn.Module, policy: nn.Module) -> dict[str, Any]:
    """The reference model is on the policy's device, shared and gathered as the policy is, and without dropout.

    Collective where there are several ranks, if only to agree.

    Args:
        ref_model: wrapped or not, sharded or not.
        policy: as training has it, wrapped and sharded.

    Returns:
        ``devices``, ``sharding`` (such as ``"fsdp1 FULL_SHARD"``, ``"zero3"``, ``"none"``) and ``dtypes`` of the
        reference model, ``policy_dtypes``, ``trainable``, the number of its parameters that require a gradient, and
        ``gathered`` and ``policy_gathered``, the largest share of each model's elements that a forward gathers at once
        (FSDP: the largest unit; ``None`` where nothing is gathered by units). Types and gradients may differ on
        purpose, so they are reported and not judged.

    Raises:
        CheckError: on every rank, with what was found of both: a reference model that is on another device than the
            policy, and neither sharded nor offloaded by a library that would bring it there.
        OddError: on every rank: one that gives the right results at the cost of memory, whole where the policy is
            sharded, or gathered as one unit where the policy is gathered layer by layer; one that is sharded otherwise;
            one with dropout switched on.
    """
    with together("the reference model"):
        found: dict[str, Any] = {
            "devices": devices(ref_model),
            "sharding": sharding(ref_model),
            "dtypes": _dtypes(ref_model),
            "policy_dtypes": _dtypes(policy),
            "trainable": sum(parameter.requires_grad for parameter in ref_model.parameters()),
            "gathered": gathered_share(ref_model),
            "policy_gathered": gathered_share(policy),
        }
        wanted = {"devices": devices(policy), "sharding": sharding(policy)}
        problems = [
            f"{kind}: {_said(found[kind])} instead of {_said(wanted[kind])}"
            for kind in wanted
            if found[kind] != wanted[kind] and not (kind == "devices" and _may_differ(ref_model, found, wanted))
        ]
        misplaced = any(problem.startswith("devices") for problem in problems)
        if _gathers_too_much(found):
            problems.append(
                f"a forward gathers {found['gathered']:.0%} of the reference model at once, of the policy "
                f"{found['policy_gathered']:.0%}: wrap it layer by layer, too"
            )
        if (cost := _whole_bytes(ref_model)) and found["sharding"] == "none" and wanted["sharding"] != "none":
            problems.append(f"every rank holds all of it, {cost / 2**20:.1f} MiB, which is right and costs memory")
        if _has_dropout(ref_model):
            problems.append("it is in training mode, so dropout is on")
        if problems:
            raise (CheckError if misplaced else OddError)(
                "expected a reference model placed and sharded like the policy, but " + "; ".join(problems) + ". "
                "Prepare it as the policy is prepared, before training, or take a corrected trainer "
                "(pytest_trlcompat.trainers)",
                found,
            )
    return found


def _may_differ(model: nn.Module, found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether devices say nothing of where a forward computes.

    So it is where somebody brings the reference model's parameters to where they are needed (sharded, an engine,
    offloaded by Accelerate), and where the policy's rest on the CPU, offloaded.
    """
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    policy_offloaded = wanted["devices"] == ["cpu"] and wanted["sharding"] != "none"
    return found["sharding"] != "none" or is_engine(model) or offloaded or policy_offloaded


def _gathers_too_much(found: dict[str, Any]) -> bool:
    mine, policy = found["gathered"], found["policy_gathered"]
    return mine is not None and policy is not None and (mine > _MORE * policy or mine > _WHOLE > policy)


def _whole_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _has_dropout(model: nn.Module) -> bool:
    """Whether a forward as the model is now would draw random numbers. DeepSpeed's engine keeps a flag of its own."""
    training = [module for module in unwrapped(model).modules() if module.training]
    layers = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in training)
    # Attention computes with a rate of its own, where it calls no module.
    rates = [getattr(module, name, 0) for module in training for name in ("attention_dropout", "dropout", "dropout_p")]
    return layers or any(isinstance(rate, float) and rate > 0 for rate in rates)


def _dtypes(model: nn.Module) -> list[str]:
    return sorted({str(parameter.dtype) for parameter in model.parameters()})


def _said(found: Any) -> str:
    return found if isinstance(found, str) else ", ".join(found)
