"""Cure of ``grpo-fsdp2-offload-generation``: generation under FSDP2 with parameters that lie on the host.

``generate`` of Transformers 5 moves what it gives the model in each step to ``model.device``, that of the parameters.
FSDP2 that offloads them keeps their shards on the host and computes on the accelerator; it moves what the root module
is called with, but not what is called beneath a ``generate`` that it was told of: ``Expected all tensors to be on the
same device, but got index is on cpu``. The cure moves it to the accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from accelerate.utils import send_to_device
from torch import nn

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import FSDP2, TRANSFORMERS_GENERATES, Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.upstream import AroundGeneration

__all__ = ["FSDPOffloadGenerationMixin", "inputs_moved"]


@contextmanager
def inputs_moved(model: nn.Module, device: Any) -> Iterator[None]:
    """Move the tensors that ``model``, or a language model in it, is called with to ``device`` while it lasts."""
    # Transformers moves what it passes to the parameters' device before each of these calls, from 5.13 on.
    called = [module for module in model.modules() if hasattr(module, "prepare_inputs_for_generation")]
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (send_to_device(args, device), send_to_device(kwargs, device)), with_kwargs=True
        )
        for module in called
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class FSDPOffloadGenerationMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` generate under FSDP2 with ``offload_params``.

    What lies on the accelerator already is not moved. Does nothing where FSDP2 offloads nothing, under another
    strategy, or with vLLM, which generates elsewhere.
    """

    _kinds: ClassVar = {
        "grpo": ("FSDPAdapterGenerationMixin", "its _around_generation calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.GENERATION,)
    _needed: ClassVar = (FSDP2, TRANSFORMERS_GENERATES)
    accelerator: Any
    args: Any

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        with self._generating_on_the_accelerator(), super()._around_generation():
            yield

    def _generating_on_the_accelerator(self) -> AbstractContextManager[None]:
        if not FSDPOffloadGenerationMixin._activity(type(self), self).active:
            return nullcontext()
        return self._unwrapping(_moving, FSDPOffloadGenerationMixin.__name__)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        why = "parameters lie on the host, where generation would put its prompts"
        return under(trainer, why, *cls._needed, _OFFLOADED)


def _offloads(trainer: Any) -> bool:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return isinstance(trainer.accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)


_OFFLOADED = Condition("with offloaded parameters", "no parameters are offloaded", _offloads)


def _moving(unwrap: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def unwrap_model_for_generation(model: nn.Module, accelerator: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with unwrap(model, accelerator, *args, **kwargs) as unwrapped, inputs_moved(unwrapped, accelerator.device):
            yield unwrapped

    return unwrap_model_for_generation
