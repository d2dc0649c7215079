"""``vllm.distributed.device_communicators.pynccl``: what carries weights is the group itself."""

from typing import Any

__all__ = ["PyNcclCommunicator"]


class PyNcclCommunicator:
    def __new__(cls, group: Any, *_: Any, **__: Any) -> Any:
        return group
