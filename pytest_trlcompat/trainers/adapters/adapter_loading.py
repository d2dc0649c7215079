"""Cure of ``peft-distributed-load``: adapters loaded by ranks, with any release of Transformers.

Where there is a process group, some releases of PEFT prepare to load adapters for tensor parallelism, whether there is
any or not, and import a class for it that few releases of Transformers have: resuming ends in ``cannot import name
'EmbeddingParallel'``. The cure leaves that preparation out where no layer is parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ADAPTER, SEVERAL_RANKS, installed, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint, owner_of, replaced

__all__ = ["AdapterLoadingMixin", "without_tensor_parallelism"]

# PEFT 0.19 imports for it what Transformers has from 5.1 on, not in 5.10.0, and dropped in 5.16.
PEFT_SHARDING = PatchPoint("peft.utils.save_and_load:_maybe_shard_state_dict_for_tp", ">=0.19")


@contextmanager
def without_tensor_parallelism(model: Any) -> Iterator[None]:
    """Keep PEFT from splitting what is loaded in this context, where it could not and need not.

    Changes nothing where ``model`` has layers that are parallel, or where PEFT finds what it imports.
    """
    # By this attribute of a layer PEFT decides whether it splits an adapter's weights.
    parallel = any(getattr(module, "_hf_tp_plan", None) is not None for module in model.modules())
    if parallel or _needless():
        yield
        return
    with replaced(PEFT_SHARDING, _splitting_nothing, AdapterLoadingMixin.__name__):
        yield


def _splitting_nothing(_upstream: Callable[..., None]) -> Callable[..., None]:
    return lambda model, state_dict, adapter_name: None


def _needless() -> str:
    """Why PEFT can be left alone; empty if it imports something that the installed Transformers does not have."""
    if not installed("peft"):
        return "PEFT is not installed"
    if owner_of(PEFT_SHARDING, AdapterLoadingMixin.__name__) is None:
        return "PEFT prepares nothing for tensor parallelism"
    return "Transformers has what PEFT imports" if _can_be_split() else ""


def _can_be_split() -> bool:
    """Whether Transformers has what PEFT imports from it."""
    try:
        return hasattr(import_module("transformers.integrations.tensor_parallel"), "EmbeddingParallel")
    except ImportError:
        return False


class AdapterLoadingMixin(Cure):
    """Lets any ``transformers.Trainer`` resume the training of adapters in several processes.

    It knows by what Transformers has, and by PEFT's own function, whether there is anything to do.
    """

    _kinds: ClassVar = {
        "trainer": ("FSDPAdapterSaveMixin", "its _load_from_checkpoint calls this one's"),
        "grpo": ("FSDPAdapterSaveMixin", "its _load_from_checkpoint calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.LOAD, PEFT_SHARDING)
    model: Any

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with without_tensor_parallelism(self.model) if ADAPTER.holds(self) else nullcontext():
            upstream: Any = super()
            return upstream._load_from_checkpoint(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if reason := _needless():
            return Activity(False, reason)
        return under(trainer, "PEFT loads adapters by what Transformers has not", ADAPTER, SEVERAL_RANKS)
