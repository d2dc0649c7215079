"""``vllm.distributed.device_communicators.pynccl``."""

from typing import Any

__all__ = ["PyNcclCommunicator"]


class PyNcclCommunicator:
    def __init__(self, group: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the recording engine has no NCCL")
