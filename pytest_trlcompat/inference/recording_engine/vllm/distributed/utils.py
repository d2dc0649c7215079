"""``vllm.distributed.utils``: trainer and server meet as ``gloo_transfer`` has them meet."""

from typing import Any

__all__ = ["StatelessProcessGroup"]


class StatelessProcessGroup:
    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the recording engine has no NCCL, and no group at {host!r} therefore")
