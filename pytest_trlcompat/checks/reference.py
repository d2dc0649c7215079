"""Is the reference model placed, shared and gathered like the policy?

Known bugs that it catches: trl 3348, of a reference model that stays whole and on the CPU under FSDP; one that is a
single unit under FSDP, so that each forward gathers all of it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pytest_trlcompat.checks._models import devices, gathered_share, is_engine, sharding, unwrapped
from pytest_trlcompat.checks._ranks import CheckError, OddError, together

__all__ = ["check_reference_model"]

_MORE = 1.5
"""A reference model gathers too much if its share gathered at once is more than so many times the policy's."""
_WHOLE = 0.99
"""Beyond this share a model is gathered whole: too much unless the policy is, too, however few layers it has."""


def check_reference_model(ref_model: nn.Module, policy: nn.Module) -> dict[str, Any]:
    """The reference model is on the policy's device, sharded and gathered like the policy, and without dropout.

    Collective if there are several ranks, only so that they agree.

    Args:
        ref_model: wrapped or not, sharded or not.
        policy: wrapped and sharded as in training.

    Returns:
        ``devices``, ``sharding`` (such as ``"fsdp1 FULL_SHARD"``, ``"zero3"``, ``"none"``) and ``dtypes`` of the
        reference model, ``policy_dtypes``, ``trainable``, the number of its parameters that require a gradient, and
        ``gathered`` and ``policy_gathered``, the largest share of each model's elements that a forward gathers at once
        (FSDP: the largest unit; ``None`` if nothing is gathered by units). Types and gradients may differ on purpose,
        so they are reported and not judged.

    Raises:
        CheckError: on every rank, with the placement of both: the reference model is on another device than the policy,
            and neither sharded nor offloaded by a library that would move it there.
        OddError: on every rank: the reference model gives the right results at the cost of memory (it is whole while
            the policy is sharded, or gathered as one unit while the policy is gathered layer by layer); it is sharded
            in another way; or its dropout is on.
    """
    with together("the reference model"):
        placement: dict[str, Any] = {
            "devices": devices(ref_model),
            "sharding": sharding(ref_model),
            "dtypes": _dtypes(ref_model),
            "policy_dtypes": _dtypes(policy),
            "trainable": sum(parameter.requires_grad for parameter in ref_model.parameters()),
            "gathered": gathered_share(ref_model),
            "policy_gathered": gathered_share(policy),
        }
        expected = {"devices": devices(policy), "sharding": sharding(policy)}
        problems = [
            f"{kind}: {_joined(placement[kind])} instead of {_joined(expected[kind])}"
            for kind in expected
            if placement[kind] != expected[kind]
            and not (kind == "devices" and _may_differ(ref_model, placement, expected))
        ]
        misplaced = any(problem.startswith("devices") for problem in problems)
        if _gathers_too_much(placement):
            problems.append(
                f"a forward gathers {placement['gathered']:.0%} of the reference model at once, of the policy "
                f"{placement['policy_gathered']:.0%}: wrap it layer by layer, too"
            )
        if (cost := _whole_bytes(ref_model)) and placement["sharding"] == "none" and expected["sharding"] != "none":
            problems.append(f"every rank holds all of it, {cost / 2**20:.1f} MiB, which is right and costs memory")
        if _has_dropout(ref_model):
            problems.append("it is in training mode, so dropout is on")
        if problems:
            raise (CheckError if misplaced else OddError)(
                "expected a reference model placed and sharded like the policy, but " + "; ".join(problems) + ". "
                "Prepare it as the policy is prepared, before training, or take a corrected trainer "
                "(pytest_trlcompat.trainers)",
                placement,
            )
    return placement


def _may_differ(model: nn.Module, placement: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether devices do not tell where a forward computes.

    They do not if a library moves the reference model's parameters to where they are needed (it is sharded, in an
    engine, or offloaded by Accelerate), or if the policy's parameters are offloaded to the CPU.
    """
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    policy_offloaded = expected["devices"] == ["cpu"] and expected["sharding"] != "none"
    return placement["sharding"] != "none" or is_engine(model) or offloaded or policy_offloaded


def _gathers_too_much(placement: dict[str, Any]) -> bool:
    mine, policy = placement["gathered"], placement["policy_gathered"]
    return mine is not None and policy is not None and (mine > _MORE * policy or mine > _WHOLE > policy)


def _whole_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _has_dropout(model: nn.Module) -> bool:
    """Whether a forward would draw random numbers now. Asks the modules: DeepSpeed's engine has a flag of its own."""
    training = [module for module in unwrapped(model).modules() if module.training]
    layers = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in training)
    # Attention computes with a rate of its own, where it calls no module.
    rates = [getattr(module, name, 0) for module in training for name in ("attention_dropout", "dropout", "dropout_p")]
    return layers or any(isinstance(rate, float) and rate > 0 for rate in rates)


def _dtypes(model: nn.Module) -> list[str]:
    return sorted({str(parameter.dtype) for parameter in model.parameters()})


def _joined(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(value)
