"""Cure of how weights reach vLLM: it gets all of them as they are, and the policy stays as it is.

Of ``grpo-vllm-weights``, ``grpo-vllm-merge-drift``, ``grpo-vllm-server-weights``, ``grpo-vllm-dora``,
``grpo-vllm-trained-tokens`` and ``grpo-vllm-tied-embeddings``, and of the first three with RLOO
(``rloo-vllm-weights``, ``rloo-vllm-merge-drift``, ``rloo-vllm-server-weights``) and distillation
(``distillation-vllm-weights``, ``distillation-vllm-merge-drift``, ``distillation-vllm-server-weights``). TRL walks the
policy's parameters and hands each to vLLM.

- Under FSDP1 it walks the model beneath FSDP's root, whose parameters (embeddings, final norm, output head) belong to
  no layer and are skipped: the engine generates with those of the checkpoint for good. An adapter is merged while its
  layers are sharded: ``inconsistent tensor size``.
- An adapter is merged into the policy and taken out again, which rounds the frozen weights twice each time: in bfloat16
  they drift away (trl 6688).
- A server's client keeps what it is handed until it has a gibibyte or the last weight, and sends it then. An adapter
  has been taken out of the policy by that time, so that the server generates with the model without it; under FSDP1 the
  memory of the weights has been freed.

- DoRA is merged by an assignment to a weight's data, which changes nothing where FSDP2 has made a DTensor of it: the
  engine generates with the model without its adapter. Rows of the embeddings that PEFT trains by themselves
  (``trainable_token_indices``) go by PEFT's names, which vLLM does not know.
- vLLM has one weight for tied embeddings. An adapter that changes input embeddings or output head alone makes two of
  it: the engine generates with one for both. This cannot be handed over, and is refused.

The cure walks from the root, a layer at a time, merges into a copy of each weight, and hands a server copies under
FSDP1. It takes the place of TRL's iterator over the weights. Where TRL has none, and walks in the method that hands
them over, that method is given what the cure walks as if it were a plain model.

Imports the standard library; torch, and PEFT where there is an adapter, inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_trlcompat.trainers import patch_points
from pytest_trlcompat.trainers._conditions import Condition, fsdp_version, trains_adapters, under
from pytest_trlcompat.trainers._cure import Activity, Cure
from pytest_trlcompat.trainers._patching import owner_of
from pytest_trlcompat.trainers.errors import CureError, leaving_out

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["VLLMSyncMixin", "parameters_for_engine"]

_METHOD = "_iter_named_params"
_EARLIER_METHOD = "sync_weights"
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_PEFT_PREFIX = "base_model.model."

Gather = Callable[[list[Any]], AbstractContextManager[Any]]


class VLLMSyncMixin(Cure):
    """Hands vLLM all weights of a policy, under FSDP1 too, and merges LoRA without touching the policy.

    Of any trainer that generates with TRL's ``VLLMGeneration``, in either mode of vLLM. LoRA of linear layers, DoRA of
    them and trained tokens are merged here; other adapters, and several with DoRA at a time, by TRL as ever. Does
    nothing without vLLM, or where neither FSDP1 nor an adapter is used.

    Raises:
        CureError: an adapter makes two weights of tied embeddings, for which vLLM has one.
    """

    _needed: ClassVar = (
        Condition(
            "with vLLM",
            "vLLM does not generate by TRL's VLLMGeneration",
            lambda trainer: getattr(trainer, "vllm_generation", None) is not None,
            needs="vllm",
        ),
        Condition(
            "under FSDP1, or with LoRA",
            "neither FSDP1 nor LoRA that it can merge is used",
            lambda trainer: fsdp_version(trainer.accelerator) == 1 or _merges(trainer.model),
        ),
    )
    accelerator: Any
    model: Any
    model_wrapped: Any
    vllm_generation: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        generation = getattr(self, "vllm_generation", None)
        if generation is not None and _is_untied(self.model):
            raise CureError(
                VLLMSyncMixin.__name__,
                wanted="an adapter that leaves tied embeddings tied",
                found="this one makes two weights of them, and vLLM has one",
                packages=("trl", "peft"),
                remedy="Keep them tied (ensure_weight_tying=True in LoraConfig, with modules_to_save), or untie them "
                f"in the checkpoint before{leaving_out(VLLMSyncMixin.__name__)}",
            )
        if generation is not None and VLLMSyncMixin._activity(type(self), self).active:
            if owner_of(patch_points.VLLM_PARAMETERS, VLLMSyncMixin.__name__) is not None:
                walk = getattr(generation, _METHOD)
                setattr(generation, _METHOD, lambda: self._parameters_for_engine(walk))
            elif owner_of(patch_points.VLLM_SYNC, VLLMSyncMixin.__name__) is not None:
                synchronise = getattr(generation, _EARLIER_METHOD)
                setattr(generation, _EARLIER_METHOD, lambda: self._synchronise(synchronise))

    def _parameters_for_engine(self, upstream: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        generation = self.vllm_generation
        walked = self._walked(generation._dist.gather_params) if self._is_walked else upstream()
        if not self._is_walked or fsdp_version(self.accelerator) != 1 or generation.mode != "server":
            return walked
        # A server's client sends a weight some time after the next has been asked for.
        return ((name, value.clone()) for name, value in walked)

    def _synchronise(self, upstream: Callable[[], None]) -> None:
        """What TRL's method does, with a model that is neither sharded nor adapted."""
        if not self._is_walked:
            upstream()
            return
        with _as_plain_model(self.vllm_generation, self._walked(_gathering(self.accelerator))):
            upstream()

    @property
    def _is_walked(self) -> bool:
        """Whether the cure can merge what is adapted; else TRL walks."""
        model = self.vllm_generation.model
        return not trains_adapters(model) or _merges(model)

    def _walked(self, gather: Gather) -> Iterator[tuple[str, torch.Tensor]]:
        if fsdp_version(self.accelerator) == 1:
            return _of_fsdp1(self._root())
        return parameters_for_engine(self.vllm_generation.model, gather)

    def _root(self) -> nn.Module:
        """FSDP1's root; before anything is wrapped, the policy."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        candidates = (self.model_wrapped, self.model)
        return next((each for each in candidates if isinstance(each, FullyShardedDataParallel)), self.model)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "the engine gets every weight, merged into a copy", *cls._needed)


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


def _gathering(accelerator: Any) -> Gather:
    """A context manager in which a list of parameters is whole."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None or plugin.zero_stage != 3:
        return lambda parameters: nullcontext()
    import deepspeed

    gather: Gather = deepspeed.zero.GatheredParameters
    return gather


@contextmanager
def _as_plain_model(generation: Any, walked: Iterator[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Let TRL's method find these weights in the place of the model, and nothing that is sharded."""
    from torch import nn

    plain = nn.Module()
    vars(plain)["named_parameters"] = lambda: walked
    instead: dict[str, Any] = {"model": plain}
    if hasattr(generation, "_dist"):  # from TRL 1.6 on
        whole: Gather = lambda parameters: nullcontext()  # noqa: E731 (an attribute)
        instead["_dist"] = SimpleNamespace(is_fsdp=False, fsdp_version=None, gather_params=whole)
    else:
        instead["is_fsdp_enabled"] = False
    before = {name: getattr(generation, name) for name in instead}
    try:
        vars(generation).update(instead)
        yield
    finally:
        vars(generation).update(before)


def _of_fsdp1(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a model that FSDP1 has wrapped: the root's own first, then each unit with all beneath it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    layers = _lora_layers(root)
    units = {
        name: module
        for name, module in root.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module is not root
    }
    outer = {name: unit for name, unit in units.items() if not any(name.startswith(f"{each}.") for each in units)}
    seen: set[str] = set()
    beneath = tuple(_bare(f"{name}.") for name in outer)
    # A layer of the root's own may have its adapter in units of their own.
    adapted = any(not f"{name}.".startswith(beneath) for name in layers)
    for prefix, unit, recurse in (("", root, adapted), *((f"{name}.", unit, True) for name, unit in outer.items())):
        with FullyShardedDataParallel.summon_full_params(unit, recurse=recurse, writeback=False):
            for name, parameter in unit.named_parameters():
                full = _bare(f"{prefix}{name}")
                if full in seen or (unit is root and full.startswith(beneath)):
                    continue
                seen.add(full)
                place = _name_for_engine(full, layers)
                if place is not None:
                    yield place, _value(parameter, _layer_of(full, layers))


def _merges(model: nn.Module) -> bool:
    """Whether a model has an adapter, and all of it is LoRA as :func:`_value` merges it."""
    return trains_adapters(model) and bool(_tuned(model)) and all(_is_plain(layer) for layer in _tuned(model).values())


def _is_untied(model: nn.Module) -> bool:
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
        return next((copies[adapter].weight for adapter in embeddings.active_adapters if adapter in copies), None)
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
    given = {name for flag in flags for name, value in flag.items() if value}
    return type(layer) is Linear and _has_dora(layer, given | set(variants))


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
            if adapter in magnitude:  # DoRA: the length of each row is learned by itself
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
