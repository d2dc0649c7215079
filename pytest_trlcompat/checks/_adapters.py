"""Where PEFT saves adapters, and what it calls their tensors there, told by PEFT's own function."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pytest_trlcompat.checks._models import clean_name, own_tensors, sharding

__all__ = ["SavedAdapter", "active_adapter", "adapter_folders", "adapter_keys", "prefixed", "saved_adapter"]


@dataclass
class SavedAdapter:
    """What a file of an adapter has to hold.

    Attributes:
        names: live tensors' names, with what each is called in the file; ``None`` where PEFT could not be asked.
        computed: tensors that are stored under a name of their own, since PEFT computes them from live ones.
        doubt: why not all is known, or ``""``.
    """

    names: dict[str, str] | None = None
    computed: dict[str, Tensor] = field(default_factory=dict)
    doubt: str = ""

    def computed_from(self, name: str, adapter: str) -> bool:
        """Whether a live tensor is stored only as what is computed from it."""
        if self.names is None or name in self.names:
            return False
        if any(key == "prompt_embeddings" for key in self.computed) or self.doubt:
            return name.startswith(f"prompt_encoder.{adapter}.")
        keys = [key for key in adapter_keys(name, adapter) if key]
        return any(key in self.computed or f"{key}_topk_weights" in self.computed for key in keys)


def adapter_folders(model: Any, folder: Path) -> dict[str, Path]:
    """The folders that hold the adapters of a model, by their names.

    PEFT's ``save_pretrained`` saves the adapter ``default`` in the folder itself and others in subfolders. A model of
    Transformers into which adapters were injected saves the active one, in the folder itself.
    """
    adapters = [str(adapter) for adapter in getattr(model, "peft_config", None) or {}]
    if not any(base.__name__ == "PeftModel" for base in type(model).__mro__):
        return {active_adapter(model): folder}
    folders = {name: folder if name == "default" else folder / name for name in adapters}
    if len(folders) == 1 and not next(iter(folders.values())).is_dir():
        return dict.fromkeys(folders, folder)
    return folders


def active_adapter(model: Any) -> str:
    """The name of the adapter in use, the first of several; ``default`` if the model has that one, or none."""
    adapters = [str(adapter) for adapter in getattr(model, "peft_config", None) or {}]
    if "default" in adapters or not adapters:
        return "default"
    active = getattr(model, "active_adapters", None)
    try:
        active = active() if callable(active) else active
    except ValueError:  # Transformers: none was loaded by it
        active = None
    chosen = [active] if isinstance(active, str) else list(active or [])
    return str(chosen[0]) if chosen else adapters[0]


def saved_adapter(model: Any, adapter: str) -> SavedAdapter:
    """What the file of an adapter has to hold. On the first rank alone: nothing here is collective.

    If the model is sharded, PEFT is asked for the names alone: it cannot compute with shards.

    Args:
        model: a model with adapters, without wrappers around it.
        adapter: the adapter's name.
    """
    config = (getattr(model, "peft_config", None) or {}).get(adapter)
    parallel = getattr(model, "_tp_size", None) or getattr(model, "tp_size", None) or 1
    # With tensor parallelism PEFT's function is collective, and the first rank alone is here.
    if config is None or parallel > 1:
        return SavedAdapter()
    sharded = sharding(model) != "none"
    if sharded and config.is_prompt_learning:
        return _sharded_prompt(model, adapter)
    from peft import get_peft_model_state_dict

    live = {name: torch.empty(0) if sharded else tensor.detach() for name, tensor in own_tensors(model, "", set())}
    # PEFT hands on live tensors as they are, and makes new ones of what it computes: identity tells them apart.
    by_identity = {id(tensor): clean_name(name) for name, tensor in live.items()}
    try:
        with _same_draws(model), torch.no_grad():  # the encoder of a prompt may have dropout
            stored = get_peft_model_state_dict(model, live, adapter, save_embedding_layers=False)
    except Exception as error:
        return SavedAdapter(doubt=f"PEFT does not tell what it stores: {type(error).__name__}: {error}")
    stored = {clean_name(key): tensor for key, tensor in stored.items()}
    return SavedAdapter(
        names={by_identity[id(tensor)]: key for key, tensor in stored.items() if id(tensor) in by_identity},
        computed={key: tensor.detach() for key, tensor in stored.items() if id(tensor) not in by_identity},
    )


def _sharded_prompt(model: Any, adapter: str) -> SavedAdapter:
    """A prompt that is an embedding is stored as it is; one that layers compute would need all of them gathered."""
    prefix = f"prompt_encoder.{adapter}."
    parts = [name.removeprefix(prefix) for name, _ in own_tensors(model, "", set()) if name.startswith(prefix)]
    names = {f"{prefix}{part}": part for part in parts if part.startswith("prefix_task_")}
    if set(parts) - {"embedding.weight"} - set(names.values()):
        return SavedAdapter(names={}, doubt="PEFT computes the prompt from weights that are sharded")
    return SavedAdapter(names={**names, f"{prefix}embedding.weight": "prompt_embeddings"})


def _same_draws(model: nn.Module) -> Any:
    """Restore the state of the random number generators afterwards."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    accelerators = [] if device.type == "cpu" else [device.index or 0]
    # It saves the CPU's state in any case, and without devices that one alone.
    return torch.random.fork_rng(accelerators, device_type=device.type if accelerators else "cuda")


def adapter_keys(name: str, adapter: str) -> list[str]:
    """What PEFT may call the tensor of an adapter in the adapter's file, which leaves out the adapter's name."""
    plain = ".".join(part for part in name.split(".") if part not in (adapter, "modules_to_save"))
    # DoRA's magnitudes lose their suffix as well.
    names = [name, plain, plain.removesuffix(".weight")]
    return [key for spelling in names for key in prefixed(spelling)]


def prefixed(name: str) -> list[str]:
    """What a tensor is called with PEFT's prefix, which models lack that an adapter was injected into."""
    return [name] if name.startswith("base_model.model.") else [name, f"base_model.model.{name}"]
