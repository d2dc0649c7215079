"""DeepSpeed's optimizers, as it builds them for a GPU or for the host, without an NPU's libraries.

ZeRO with ``offload_optimizer`` takes those on the host, for Transformers' own AdamW too. Their C++ is compiled by the
first rank that needs them, in one to three minutes, and kept. ``{"optimizer": {"type": "AdamW"}}`` in DeepSpeed's
configuration takes ``FusedAdam``: a kernel in CUDA on a GPU, and the same arithmetic by torch's operators here.
"""

from __future__ import annotations

import fcntl
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

__all__ = ["HOST_BUILDERS", "deepspeed_builds_no_kernels_for_npus", "multi_tensor_adam"]

HOST_BUILDERS = ("CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder")


def deepspeed_builds_no_kernels_for_npus(module: ModuleType) -> None:
    """Make ``NPU_Accelerator`` of ``deepspeed.accelerator.npu_accelerator`` return these builders."""
    accelerator = module.NPU_Accelerator
    collect = accelerator._lazy_init_class_dict

    def collect_builders(self: Any) -> None:
        if self.class_dict:
            return
        collect(self)
        # Not simply "deepspeed.ops.op_builder.cpu": in a checkout of DeepSpeed, the builders lie next to the package.
        host = importlib.import_module(self.op_builder_dir().removesuffix(".npu") + ".cpu")
        for name in HOST_BUILDERS:
            if hasattr(host, name):
                self.class_dict[name] = _subclass(getattr(host, name), _load_alone)
        self.class_dict["FusedAdamBuilder"] = _subclass(self.class_dict["FusedAdamBuilder"], _load_fused_adam)

    accelerator._lazy_init_class_dict = collect_builders


def _subclass(builder: type, load: Any) -> type:
    members = {"load": lambda self, *args, **kwargs: load(builder, self, *args, **kwargs)}
    return type(builder.__name__, (builder,), {**members, "__module__": builder.__module__})


def _load_alone(builder: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile under a lock that ends with its process.

    Torch's own, before 2.15, is a file whose existence counts: after a rank that was killed while it compiled, every
    later one would wait for ever.
    """
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(self.name, False))
    # Whoever could read it could hold it, and every rank would wait for them.
    handle = os.open(folder / "trlcompat.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        # Torch's file, of a rank that was killed: whoever compiles now holds the lock above.
        (folder / "lock").unlink(missing_ok=True)
        return builder.load(self, *args, **kwargs)
    finally:
        os.close(handle)


def _load_fused_adam(_builder: Any, _self: Any, *_args: Any, **_kwargs: Any) -> SimpleNamespace:
    return SimpleNamespace(multi_tensor_adam=multi_tensor_adam)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensors: Sequence[Sequence[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    adam_w_mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of Adam or, with decoupled weight decay, AdamW, in place and computed in float32.

    Args:
        chunk_size, noop_flag: of the kernel, which works by chunks and does nothing after an overflow.
        tensors: gradients, parameters, first and second moments; four lists of equal length.
        step: from 1 on.
    """
    if noop_flag.item():
        return
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    with torch.no_grad():
        for grad, parameter, first, second in zip(*tensors, strict=True):
            value, gradient = parameter.float(), grad.float()
            if not adam_w_mode:
                gradient = gradient + weight_decay * value
            first.copy_(beta1 * first.float() + (1 - beta1) * gradient)
            second.copy_(beta2 * second.float() + (1 - beta2) * gradient * gradient)
            change = (first.float() / corrections[0]) / ((second.float() / corrections[1]).sqrt() + epsilon)
            if adam_w_mode:
                change = change + weight_decay * value
            parameter.copy_(value - lr * change)
