"""The engine of a GRPO training with vLLM, inside a rank: its tensors, and what they must be for a policy.

What they must be is computed from the policy's parameters alone, by vLLM's documented layout and PEFT's formula for
LoRA; neither library's code takes part. Imports the stack only inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Comparison", "Expected", "compare", "engine_model", "merged", "packed", "unpacked"]

_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that vLLM has as one, with their parts in order, stacked by rows."""
_ADAPTER = "default"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Expected:
    """What a tensor of the engine must be.

    Attributes:
        value: in float64.
        error: the most that its computation may be off, elementwise, beside the engine's rounding; ``None``: nothing.
        change: how much the adapter contributes, elementwise; ``None`` without one.
    """

    value: torch.Tensor
    error: torch.Tensor | None = None
    change: torch.Tensor | None = None


@dataclass(frozen=True)
class Comparison:
    """The engine's tensors against what they must be.

    Attributes:
        tensors: how many were compared.
        wrong: names of those that differ, and by how much at most.
        margin: by how many times its tolerance the adapter's contribution stands out, in the tensor where it does so
            most: merging it not at all or twice is seen if this is above one. ``None`` without an adapter.
    """

    tensors: int
    wrong: Mapping[str, float]
    margin: float | None


def engine_model(trainer: Any) -> Any:
    """The engine's own module in this process."""
    llm = getattr(getattr(trainer, "vllm_generation", None), "llm", None) or trainer.llm
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def merged(parameters: Mapping[str, torch.Tensor], scaling: float, dtype: torch.dtype) -> dict[str, Expected]:
    """The policy without its adapter's modules, under the names of a checkpoint: ``W + scaling * B A``.

    Args:
        parameters: of the policy, whole, in float32, by name.
        dtype: in which PEFT merges, that of the parameters.
    """
    import torch

    unit = torch.finfo(dtype).eps
    found: dict[str, Expected] = {}
    for full_name, parameter in parameters.items():
        name = full_name.removeprefix(_PREFIX)
        if ".lora_" in name or ".original_module." in name:
            continue
        value = parameter.double()
        place, layer, rest = name.partition(".base_layer.")
        if not layer:
            found[name.replace(f".modules_to_save.{_ADAPTER}.", ".")] = Expected(value)
            continue
        a = parameters.get(f"{_PREFIX}{place}.lora_A.{_ADAPTER}.weight")
        if a is None or rest != "weight":
            found[f"{place}.{rest}"] = Expected(value)
            continue
        b = parameters[f"{_PREFIX}{place}.lora_B.{_ADAPTER}.weight"]
        change = scaling * (b.double() @ a.double())
        # The product, its scaling and the sum are rounded once each; the product's terms by the rank's sum.
        error = 4 * unit * (value.abs() + scaling * (b.double().abs() @ a.double().abs()))
        found[f"{place}.{rest}"] = Expected(value + change, error, change)
    return found


def packed(expected: Mapping[str, Expected], engine: Any) -> Iterator[tuple[str, torch.Tensor, Expected]]:
    """Each of the engine's parameters with what it must be.

    Raises:
        KeyError: the policy has no such parameter.
    """
    import torch

    for name, parameter in engine.named_parameters():
        layer = next((layer for layer in _PACKED if f".{layer}." in name), None)
        if layer is None:
            yield name, parameter, expected[name]
            continue
        parts = [expected[name.replace(f".{layer}.", f".{part}.")] for part in _PACKED[layer]]
        value = torch.cat([part.value for part in parts])
        nothing = [torch.zeros_like(part.value) for part in parts]
        error = torch.cat(
            [zero if part.error is None else part.error for part, zero in zip(parts, nothing, strict=True)]
        )
        change = torch.cat(
            [zero if part.change is None else part.change for part, zero in zip(parts, nothing, strict=True)]
        )
        adapted = any(part.change is not None for part in parts)
        yield name, parameter, Expected(value, error if adapted else None, change if adapted else None)


def unpacked(expected: Mapping[str, Expected], engine: Any) -> dict[str, torch.Tensor]:
    """What the engine holds, in float32, under the names of a checkpoint.

    Args:
        expected: of the policy, which says how many rows each part of a layer has.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in engine.named_parameters():
        held = parameter.detach().float().cpu()
        layer = next((layer for layer in _PACKED if f".{layer}." in name), None)
        if layer is None:
            found[name] = held[: expected[name].value.shape[0]].clone()
            continue
        parts = [name.replace(f".{layer}.", f".{part}.") for part in _PACKED[layer]]
        rows = [expected[part].value.shape[0] for part in parts]
        found.update(zip(parts, (piece.clone() for piece in held.split(rows)), strict=True))
    return found


def compare(expected: Mapping[str, Expected], engine: Any) -> Comparison:
    """Tensor by tensor: bitwise in the engine's dtype, and within rounding where an adapter was merged."""
    import torch

    wrong: dict[str, float] = {}
    margins: list[float] = []
    count = 0
    for name, parameter, truth in packed(expected, engine):
        count += 1
        found = parameter.detach().cpu()[: truth.value.shape[0]]  # the vocabulary is padded
        off = (found.double() - truth.value).abs()
        if truth.error is None or truth.change is None:
            if not torch.equal(found, truth.value.float().to(found.dtype)):
                wrong[name] = float(off.max())
            continue
        tolerance = truth.error + torch.finfo(found.dtype).eps * truth.value.abs()
        if not bool((off <= tolerance).all()):
            wrong[name] = float(off.max())
        margins.append(float((truth.change.abs() / tolerance.clamp_min(1e-30)).max()))
    return Comparison(count, wrong, max(margins, default=None))
