"""Makes libraries take their branches for CUDA on the software accelerator, where they would take those for NPUs.

Nobody with a GPU meets what goes wrong in a branch for NPUs. Each adaptation changes one attribute of one module of a
library, as the module is imported, and only in processes that have the software accelerator. ``npu_branches.toml`` says
what is changed, from which release to which, and why; it names the adaptation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from torch_npu import _triton
from torch_npu._op_builders import deepspeed_builds_no_kernels_for_npus

__all__ = ["ADAPTATIONS", "install"]


def distributed_type_is_multi_gpu(module: ModuleType) -> None:
    """``MULTI_NPU == "MULTI_GPU"`` for code that compares with the bare text, as TRL does to load without a device map.

    Accelerate itself compares its own members with each other, and still tells them apart.
    """
    kind = module.DistributedType
    equal, unequal = kind.__eq__, kind.__ne__

    def is_asked(self: Any, other: object) -> bool:
        return type(other) is str and other == "MULTI_GPU" and self is kind.MULTI_NPU

    # Set on the finished class, which thereby keeps its hash: members are keys of dictionaries.
    kind.__eq__ = lambda self, other: is_asked(self, other) or equal(self, other)
    kind.__ne__ = lambda self, other: not is_asked(self, other) and unequal(self, other)


def fsdp_has_a_backend_for_the_cpu(module: ModuleType) -> None:
    """``npu:hccl,cpu:gloo`` where Accelerate asks for ``cuda:nccl,cpu:gloo``: FSDP with parameters on the CPU.

    Whether it does so is read from its code's constants: from 1.7.0 on where parameters are offloaded, from 1.9.0 on
    also for whole state dicts.
    """
    prepare = module.PartialState._prepare_backend
    constants = module.PartialState.__init__.__code__.co_consts
    if "cuda:nccl,cpu:gloo" not in constants:
        return

    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        backend, kind = prepare(self, *args, **kwargs)
        whole = "FULL_STATE_DICT" in constants and os.environ.get("FSDP_STATE_DICT_TYPE") == "FULL_STATE_DICT"
        if backend == "hccl" and _is_set("ACCELERATE_USE_FSDP") and (whole or _is_set("FSDP_OFFLOAD_PARAMS")):
            backend = "npu:hccl,cpu:gloo"
        return backend, kind

    module.PartialState._prepare_backend = prepare_backend


def attention_masks_stay_as_they_are(module: Any) -> None:
    """On an NPU, Transformers turns sdpa's masks of numbers into masks of booleans, and repeats keys and values."""
    if hasattr(module, "_is_torch_npu_available"):
        module._is_torch_npu_available = False


def deepspeed_names_its_device(module: ModuleType) -> None:
    """``get_accelerator().device()`` is a ``torch.device`` as on CUDA, where on an NPU it was a context before."""
    module.NPU_Accelerator.device = lambda self, device_index=None: torch.device("npu", device_index)


def a_vllm_server_gets_its_weights(module: ModuleType) -> None:
    """Weights reach a vLLM server. TRL sends them from CUDA devices only, since NCCL carries them; here gloo does."""
    from pytest_trlcompat.inference import gloo_transfer

    gloo_transfer.adapt_client(module)


def a_vllm_server_is_told_a_device(module: ModuleType) -> None:
    """The number of the device is known from which TRL sends weights to a vLLM server. TRL asks CUDA for it."""
    from pytest_trlcompat.inference import gloo_transfer

    gloo_transfer.adapt_generation(module)


def a_trainer_tells_its_vllm_server_a_device(module: ModuleType) -> None:
    """As :func:`a_vllm_server_is_told_a_device`, for TRL before 0.28, whose trainers themselves ask CUDA."""
    from pytest_trlcompat.inference import gloo_transfer

    gloo_transfer.adapt_trainer(module)


ADAPTATIONS: dict[str, tuple[Callable[[ModuleType], None], ...]] = {
    "accelerate.utils.dataclasses": (distributed_type_is_multi_gpu,),
    "accelerate.state": (fsdp_has_a_backend_for_the_cpu,),
    "transformers.integrations.sdpa_attention": (attention_masks_stay_as_they_are,),
    "trl.extras.vllm_client": (a_vllm_server_gets_its_weights,),
    "trl.generation.vllm_client": (a_vllm_server_gets_its_weights,),
    "trl.generation.vllm_generation": (a_vllm_server_is_told_a_device,),
    "trl.trainer.grpo_trainer": (a_trainer_tells_its_vllm_server_a_device,),
    "trl.trainer.rloo_trainer": (a_trainer_tells_its_vllm_server_a_device,),
    "deepspeed.accelerator.npu_accelerator": (deepspeed_names_its_device, deepspeed_builds_no_kernels_for_npus),
    **_triton.ADAPTATIONS,
}
"""What is done to each module once it has been imported."""


def install() -> None:
    """Adapt the modules that have been imported already, and the others as they are imported."""
    _triton.use_the_interpreter()
    for name in ADAPTATIONS:
        if name in sys.modules:
            _adapt(sys.modules[name], name)
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds no module itself, but adapts those that other finders find."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ADAPTATIONS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Adapting(spec.loader)
                return spec
        return None


class _Adapting(Loader):
    """Loads as the module's own loader does, then adapts the module, and leaves nothing of itself behind."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _adapt(module, module.__name__)


def _adapt(module: ModuleType, name: str) -> None:
    for adaptation in ADAPTATIONS[name]:
        adaptation(module)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"
