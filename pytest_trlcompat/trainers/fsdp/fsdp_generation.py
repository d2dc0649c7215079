"""Cure of ``grpo-fsdp-generation``, ``lora-fsdp-bf16-generation`` and ``grpo-fsdp-compiled-generation``.

Under FSDP1 GRPO generates with the module beneath the wrapper. FSDP1 gathers the parameters of each layer when the
layer is called, but those of the root (embeddings, final norm, output head) only when the wrapper is: ``'weight' must
be 2-D``. Newer releases of TRL gather them, in full precision; in mixed precision an adapter beneath then meets what is
not: ``mat1 and mat2 must have the same dtype``. The cure gathers them as a forward pass does. FSDP2 has no wrapper and
needs no cure.

With ``torch_compile`` Accelerate, asked to unwrap the compiled module, leaves in it what is beneath FSDP's root, for
good; nobody finds the root there any more, neither TRL, to gather its parameters, nor who saves the model. The
accelerator still has it among the models that it trains: the cure puts it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import _runtime_utils as fsdp1  # frozen; what it has in public gathers in full precision
from torch.distributed.fsdp._common_utils import HandleTrainingState

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import FSDP1, TRANSFORMERS_GENERATES, Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.curing.upstream import AroundGeneration, class_uses
from pytest_trlcompat.trainers.fsdp.fsdp_ref_model import beneath_compile

__all__ = ["FSDPGenerationMixin", "root_parameters_gathered", "root_put_back"]


@contextmanager
def root_parameters_gathered(model: nn.Module) -> Iterator[None]:
    """Gather the root parameters of an FSDP1 ``model`` on every rank while the context lasts; collective.

    In the dtype in which the mixed precision policy computes, as a forward pass of the root would, so that they fit the
    layers, which stay sharded and are gathered one at a time as ever. (``summon_full_params`` gathers in full
    precision: ``expected m1 and m2 to have the same dtype``.) Not to be trained with. Does nothing for any other model.
    """
    root = beneath_compile(model)
    if not isinstance(root, FullyShardedDataParallel):
        yield
        return
    # Else the first unit below that is called takes itself for the root.
    fsdp1._lazy_init(root, root)
    handle: Any = root._handle
    # The root has no parameters of its own, or somebody has gathered them.
    if handle is None or handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS:
        yield
        return
    if handle._training_state != HandleTrainingState.IDLE:
        raise RuntimeError(f"asked to gather FSDP1's root within {handle._training_state}; do so between steps")
    # The root's forward pass begins with it; `fsdp_gradients` says what is lost without.
    handle._reset_flat_param_grad_info_if_needed()
    free = handle.needs_unshard()
    stream = root._device_handle.current_stream()
    handle._training_state = HandleTrainingState.FORWARD  # what is gathered is for computing with it
    try:
        # On the stream that computes, so that no stream has to wait for another one.
        fsdp1._unshard(root, handle, stream, stream)
        # Whoever summons the root's parameters meanwhile, as newer releases of TRL do, finds that they are there.
        handle._training_state = HandleTrainingState.SUMMON_FULL_PARAMS
        yield
    finally:
        handle._training_state = HandleTrainingState.IDLE
        fsdp1._reshard(root, handle, free)


def root_put_back(model: nn.Module, accelerator: Any) -> None:
    """Put FSDP1's root back into a compiled ``model`` from which unwrapping has taken it.

    Does nothing where it is there, and for any model that is not compiled.

    Raises:
        CureError: none of the models that ``accelerator`` trains wraps what is there instead.
    """
    inner = beneath_compile(model)
    if inner is model or isinstance(inner, FullyShardedDataParallel):
        return
    root = next(
        (wrapper for wrapper in map(beneath_compile, accelerator._models) if _beneath_fsdp(wrapper) is inner), None
    )
    if root is None:
        raise CureError(
            FSDPGenerationMixin.__name__,
            expected=f"FSDP1's root above the {type(inner).__name__} that is compiled",
            seen=f"it is none of the {len(accelerator._models)} models of the accelerator",
            packages=("accelerate", "torch"),
        )
    model._orig_mod = root


def _beneath_fsdp(model: Any) -> Any:
    while isinstance(model, FullyShardedDataParallel):
        model = model.module
    return model


class FSDPGenerationMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` generate under FSDP1 ``full_shard``, also with ``torch_compile``.

    Where TRL calls ``summon_full_params``, known by looking at the trainer's methods, it does something in mixed
    precision, in which TRL would gather in full precision what its layers compute in another, and for a compiled model,
    in which TRL finds no root to gather. With vLLM, which generates elsewhere, it does nothing.
    """

    _kinds: ClassVar = {
        "grpo": ("FSDPReferenceModelMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.GENERATION, *patch_points.FSDP1_ROOT)
    _needed: ClassVar = (FSDP1, TRANSFORMERS_GENERATES)
    accelerator: Any
    args: Any

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        with self._generation_gathered(), super()._around_generation():
            yield

    def _generation_gathered(self) -> AbstractContextManager[None]:
        needed = FSDPGenerationMixin._activity(type(self), self).active
        return self._unwrapping(_gathering, FSDPGenerationMixin.__name__) if needed else nullcontext()

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        # Before any look at code: it is asked in every step.
        if trainer is not None and not (known := under(trainer, "", *cls._needed)).active:
            return known
        if not class_uses(trainer_class, "summon_full_params"):
            return under(trainer, "upstream generates beneath FSDP1's root", *cls._needed)
        why = "upstream summons the root's parameters in full precision, or finds no root in a compiled model"
        return under(trainer, why, *cls._needed, _SUMMONED_WRONGLY)


def _compiles(trainer: Any) -> bool:
    """Whether the model is compiled, or will be when Accelerate prepares it."""
    asked = trainer.accelerator.state.dynamo_plugin.backend.value != "NO"
    return asked or beneath_compile(trainer.model_wrapped) is not trainer.model_wrapped


_SUMMONED_WRONGLY = Condition(
    "in mixed precision or compiled",
    "upstream summons the root's parameters itself",
    lambda trainer: trainer.accelerator.state.fsdp_plugin.mixed_precision_policy is not None or _compiles(trainer),
)


def _gathering(unwrap: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def unwrap_model_for_generation(model: nn.Module, accelerator: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # Twice: something may have unwrapped the compiled model before this step, and TRL's function unwraps it again.
        root_put_back(model, accelerator)
        with unwrap(model, accelerator, *args, **kwargs) as unwrapped:
            root_put_back(model, accelerator)
            # A ``PeftModel`` generates beneath the forward pass that Accelerate has put under autocast, and gives
            # adapters inputs of the dtype in which their shards are stored.
            with root_parameters_gathered(model), accelerator.autocast():
                yield unwrapped

    return unwrap_model_for_generation
