"""A policy's weights as vLLM takes them: whole, under the names of a checkpoint, adapters merged into copies.

One at a time, of a model that is not sharded or as FSDP or ZeRO-3 have it. Which adapters are merged here, and whether
one makes two weights of tied embeddings, is decided here as well. What is done with the weights: ``vllm_sync``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.trainers.curing.conditions import trains_adapters

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Gather", "is_untied", "merges", "parameters_for_engine", "parameters_of_fsdp1"]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_PEFT_PREFIX = "base_model.model."

Gather = Callable[[list[Any]], AbstractContextManager[Any]]
"""A context manager in which a list of parameters is whole."""


def parameters_for_engine(model: nn.Module, gather: Gather) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's parameters under the names of its checkpoint, one at a time, LoRA merged into copies.

    The model is not changed, and no more than one layer of it is gathered at once. Collective where it is sharded.

    Args:
        model: not sharded, partitioned by ZeRO-3, or sharded by FSDP2.
        gather: a context manager in which a list of parameters is whole.

    Yields:
        Names and whole tensors, each valid until the next.
    """
    layers = _lora_layers(model)
    for name, parameter in model.named_parameters():
        place = _name_for_engine(name, layers)
        if place is not None:
            layer = _layer_of(name, layers)
            needed = [parameter] if layer is None else [parameter, *_factors(layer)]
            with gather(needed):
                yield place, _whole(_value(parameter, layer))


def parameters_of_fsdp1(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a model that FSDP1 has wrapped: the root's own first, then each unit with all beneath it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    layers = _lora_layers(root)
    units = {
        name: module
        for name, module in root.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module is not root
    }
    # A unit within another one is gathered together with it.
    outer = {name: unit for name, unit in units.items() if not any(name.startswith(f"{other}.") for other in units)}
    seen: set[str] = set()
    beneath = tuple(_bare(f"{name}.") for name in outer)
    # A layer of the root's own may have its adapter in units of their own.
    adapted = any(not f"{name}.".startswith(beneath) for name in layers)
    for prefix, unit, recurse in (("", root, adapted), *((f"{name}.", unit, True) for name, unit in outer.items())):
        # Nothing is changed here, so FSDP1 need not copy it back into the shards.
        with FullyShardedDataParallel.summon_full_params(unit, recurse=recurse, writeback=False):
            for name, parameter in unit.named_parameters():
                full = _bare(f"{prefix}{name}")
                if full in seen or (unit is root and full.startswith(beneath)):
                    continue
                seen.add(full)
                place = _name_for_engine(full, layers)
                if place is not None:
                    yield place, _value(parameter, _layer_of(full, layers))


def merges(model: nn.Module) -> bool:
    """Whether a model has an adapter, and all of it is LoRA as :func:`_value` merges it."""
    return trains_adapters(model) and bool(_tuned(model)) and all(_is_plain(layer) for layer in _tuned(model).values())


def is_untied(model: nn.Module) -> bool:
    """Whether a checkpoint has one weight for input and output embeddings, and an adapter makes two of it."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not trains_adapters(model) or not getattr(text, "tie_word_embeddings", False):
        return False
    return _used(model.get_input_embeddings()) is not _used(model.get_output_embeddings())


def _used(embeddings: Any) -> Any:
    """What stands for the weight that is used: equal for equal weights alone."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(embeddings, BaseTunerLayer):
        return embeddings
    copies = getattr(embeddings, "modules_to_save", None)
    if copies is not None:
        active = getattr(embeddings, "active_adapters", None) or [embeddings.active_adapter]  # one, in early PEFT
        return next((copies[adapter].weight for adapter in active if adapter in copies), None)
    original = getattr(embeddings, "original_module", embeddings)  # of trained tokens, which PEFT keeps tied
    return getattr(original, "weight", None)


def _tuned(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {_bare(name): module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _is_plain(layer: Any) -> bool:
    from peft.tuners.lora import Linear

    if _trains_tokens(layer):
        return True
    variants = getattr(layer, "lora_variant", None) or {}
    flags = (getattr(layer, name, None) or {} for name in ("use_dora", "lora_bias"))
    enabled = {name for flag in flags for name, value in flag.items() if value}
    return type(layer) is Linear and _has_dora(layer, enabled | set(variants))


def _has_dora(layer: Any, adapters: set[str]) -> bool:
    """Whether these adapters, if any, are LoRA with a magnitude, and nothing else is active."""
    if adapters and (len(layer.active_adapters) > 1 or layer.fan_in_fan_out):
        return False
    variants = getattr(layer, "lora_variant", None) or {}
    biased = getattr(layer, "lora_bias", None) or {}
    return all(
        adapter in getattr(layer, "lora_magnitude_vector", {})
        and not biased.get(adapter)
        and (adapter not in variants or type(variants[adapter]).__name__ == "DoraLinearVariant")
        for adapter in adapters
    )


def _lora_layers(model: nn.Module) -> dict[str, Any]:
    """Of a model's layers with LoRA the names, without those of wrappers; empty without an adapter."""
    wrapped = next((module for module in model.modules() if trains_adapters(module)), None)
    return {} if wrapped is None else _tuned(model)


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _layer_of(name: str, layers: Mapping[str, Any]) -> Any:
    """The layer whose adapter changes this parameter; ``None`` for any other."""
    return layers.get(_bare(name).removesuffix(".base_layer.weight")) if name.endswith(".base_layer.weight") else None


def _name_for_engine(name: str, layers: Mapping[str, Any]) -> str | None:
    """The name in a checkpoint; ``None`` for what that does not have: adapters, and originals of what learns whole."""
    bare = _bare(name)
    active = {adapter for layer in layers.values() for adapter in layer.active_adapters}
    if any(f".{part}." in bare for part in ("original_module", *_ADAPTER_PARTS)):
        return None
    head, saved, rest = bare.partition(".modules_to_save.")
    if saved:
        adapter, _, last = rest.partition(".")
        if adapter not in active:
            return None
        bare = f"{head}.{last}"
    return bare.removeprefix(_PEFT_PREFIX).replace(".token_adapter.", ".").replace(".base_layer.", ".")


_ADAPTER_PARTS = (
    *("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"),
    "trainable_tokens_delta",
)


def _factors(layer: Any) -> list[Any]:
    if _trains_tokens(layer):
        return [layer.trainable_tokens_delta[adapter] for adapter in layer.active_adapters]
    parts = (layer.lora_A, layer.lora_B, getattr(layer, "lora_magnitude_vector", {}))
    return [part[adapter].weight for adapter in layer.active_adapters for part in parts if adapter in part]


def _trains_tokens(layer: Any) -> bool:
    """Whether it is PEFT's layer of an embedding of which some rows are trained."""
    return hasattr(layer, "trainable_tokens_delta")


def _value(parameter: torch.Tensor, layer: Any) -> torch.Tensor:
    """A parameter with what the active adapters add to it."""
    value = parameter.detach()
    if layer is None or layer.disable_adapters or layer.merged:
        return value
    if _trains_tokens(layer):
        return layer.get_merged_weights(layer.active_adapters).detach()
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            value = value + layer.get_delta_weight(adapter).to(value.dtype)
            magnitude = getattr(layer, "lora_magnitude_vector", {})
            # DoRA: the length of each row is learned by itself.
            if adapter in magnitude:
                value = (magnitude[adapter].weight / value.norm(dim=1)).to(value.dtype).view(-1, 1) * value
    return value.detach()


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Of a tensor that FSDP2 has sharded all of it; on the rank's device, where offloading has put it on the CPU."""
    if not hasattr(value, "full_tensor"):
        return value
    mesh: Any = value.device_mesh
    if value.device.type != mesh.device_type:
        value = value.to(mesh.device_type)
    whole: torch.Tensor = value.full_tensor()
    return whole
