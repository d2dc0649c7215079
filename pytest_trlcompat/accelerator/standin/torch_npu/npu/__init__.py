"""``torch.npu``: the device module, with the functions that PyTorch, Accelerate, DeepSpeed and Transformers call.

Every operation has finished when it returns and nothing is initialised late, so many of them have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from torch_npu import _C
from torch_npu._missing import lacking
from torch_npu.npu import amp, random  # noqa: F401 - torch.npu.amp, torch.npu.random
from torch_npu.npu._index import Device, index_of
from torch_npu.npu.memory import *  # noqa: F403
from torch_npu.npu.memory import TOTAL_BYTES
from torch_npu.npu.options import *  # noqa: F403
from torch_npu.npu.random import *  # noqa: F403
from torch_npu.npu.random import default_generators  # noqa: F401
from torch_npu.npu.streams import *  # noqa: F403
from torch_npu.npu.tensors import *  # noqa: F403

NAME = "software accelerator"


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def _lazy_init() -> None:
    pass


def _lazy_call(callback: Callable[[], Any]) -> None:
    callback()


def _is_in_bad_fork() -> bool:
    # Unlike a GPU's, this device's state survives a fork: ranks are forked from a server that has loaded it.
    return False


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def set_device(device: Device) -> None:
    _C.set_device(index_of(device))


class device:  # noqa: N801 - torch's name
    """Makes ``device`` current for as long as the context lasts."""

    def __init__(self, device: Device) -> None:
        # The names that these have in torch.cuda.device.
        self.idx = index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _C.current_device()
        _C.set_device(self.idx)

    def __exit__(self, *_exception: object) -> None:
        _C.set_device(self.prev_idx)

    def __getattr__(self, name: str) -> Any:
        return lacking("torch.npu.device")(name)


def synchronize(device: Device = None) -> None:
    # Every operation has finished when it returns.
    pass


def get_device_name(device: Device = None) -> str:
    return NAME


def get_device_capability(device: Device = None) -> tuple[int, int]:
    return (0, 0)


def get_device_properties(device: Device = None) -> SimpleNamespace:
    return SimpleNamespace(name=NAME, total_memory=TOTAL_BYTES, major=0, minor=0)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("npu")


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("npu")


__getattr__ = lacking("torch.npu")
