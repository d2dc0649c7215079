"""Cure of ``lora-fsdp-save``: adapters saved, and resumed, under FSDP1.

PEFT looks adapters' tensors up in the state dict by the names of their modules, and takes FSDP's
``_fsdp_wrapped_module`` out at the front of a name alone. FSDP1 wraps every layer, so that a module's name has it in
the middle, and the state dict nowhere: depending on the release of PEFT, ``save_model`` and checkpoints write an
``adapter_model.safetensors`` without one tensor, or a checkpoint is resumed without its adapter, both without an error.
To resume, PEFT may look names up in the state dict as well, which under FSDP1 only rank 0 has: the others would keep
their shards as they are. And where ``modules_to_save`` are sharded, rank 0 alone asks them for a state dict, to know
its keys, and waits for the others for ever; in a checkpoint the others look for those keys in the state dict that they
have not.

The cure names modules as the state dict does while adapters are saved or loaded, and gives every rank its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import FSDP1, fsdp_version, trains_adapters
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = [
    "FSDPAdapterSaveMixin",
    "adapter_found",
    "keys_of_the_state_dict",
    "names_of_the_state_dict",
    "shards_adapter",
]

_WRAPPER = "_fsdp_wrapped_module"


@contextmanager
def names_of_the_state_dict(model: Any) -> Iterator[None]:
    """Let ``model.named_modules()`` name modules as the state dict does, without FSDP1's wrappers, while it lasts.

    A wrapper and what it wraps then have the same name. Changes nothing where there is no wrapper.
    """
    upstream = model.named_modules

    def named_modules(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, module in upstream(*args, **kwargs):
            yield ".".join(part for part in name.split(".") if part != _WRAPPER), module

    with _with_method(model, "named_modules", named_modules):
        yield


@contextmanager
def keys_of_the_state_dict(model: Any, known: bool = True) -> Iterator[None]:
    """Let ``model.state_dict()`` give this rank all keys while it lasts, for those who look up nothing else.

    The values are this rank's shards: nothing is gathered, and ranks need not meet. Asked with arguments, as the module
    above it asks, ``model`` answers as ever.

    Args:
        known: ``False`` for no key at all.
    """
    upstream = model.state_dict

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return upstream(*args, **kwargs)
        if not known:
            return {}
        with names_of_the_state_dict(model):
            return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    with _with_method(model, "state_dict", state_dict):
        yield


@contextmanager
def _with_method(model: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of this one model; these may be nested."""
    before = vars(model).get(name)
    setattr(model, name, method)
    try:
        yield
    finally:
        if before is None:
            delattr(model, name)
        else:
            setattr(model, name, before)


def shards_adapter(model: Any, accelerator: Any) -> bool:
    """Whether ``model``, unwrapped, is a ``PeftModel`` that ``accelerator`` shards by FSDP1."""
    return fsdp_version(accelerator) == 1 and trains_adapters(model)


@contextmanager
def adapter_found(model: Any, known: bool = True) -> Iterator[None]:
    """Let PEFT find the tensors of ``model``, a ``PeftModel`` that FSDP1 has sharded, in a state dict of the whole.

    Args:
        known: whether this rank has that state dict.
    """
    with ExitStack() as stack:
        stack.enter_context(names_of_the_state_dict(model))
        for module in model.modules():
            if hasattr(module, "modules_to_save") and hasattr(module, "adapter_state_dict"):
                # The copies that learn of the modules that PEFT saves whole, with whatever wraps them.
                for copy in module.modules_to_save.values():
                    stack.enter_context(keys_of_the_state_dict(copy, known))
        yield


class FSDPAdapterSaveMixin(Cure):
    """Lets any ``transformers.Trainer`` save adapters under FSDP1 and resume from them.

    Does nothing without adapters and under another strategy.
    """

    _kinds: ClassVar = {
        "trainer": ("FSDPSaveMixin", "its save_model calls this one's"),
        "grpo": ("FSDPSaveMixin", "its save_model calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.SAVE_MODEL, patch_points.SAVE_CHECKPOINT, patch_points.LOAD)
    _needed: ClassVar = (FSDP1,)
    accelerator: Any
    model: Any

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        with self._adapter_found():
            upstream: Any = super()
            upstream.save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self._adapter_found():
            upstream: Any = super()
            return upstream._save_checkpoint(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        # The parameters are (resume_from_checkpoint, model=None).
        model = args[1] if len(args) > 1 else kwargs.get("model")
        loaded = self.model if model is None else model
        keys = keys_of_the_state_dict(loaded) if self._shards_adapters() else nullcontext()
        with self._adapter_found(loading=True), keys:
            upstream: Any = super()
            return upstream._load_from_checkpoint(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if trainer is None:
            return Activity(None, "changes something under FSDP1 with adapters")
        if not shards_adapter(trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator):
            return Activity(False, "FSDP1 shards no adapter")
        return Activity(True, "PEFT does not find tensors by the names that FSDP1 gives modules")

    def _shards_adapters(self) -> bool:
        return shards_adapter(self.accelerator.unwrap_model(self.model), self.accelerator)

    @contextmanager
    def _adapter_found(self, loading: bool = False) -> Iterator[None]:
        if not self._shards_adapters():
            yield
            return
        # The state dict that is saved, rank 0 alone has.
        known = loading or self.accelerator.process_index == 0
        bare = self.accelerator.unwrap_model(self.model)
        with names_of_the_state_dict(self.model), adapter_found(bare, known):
            yield
