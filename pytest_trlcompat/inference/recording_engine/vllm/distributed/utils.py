"""``vllm.distributed.utils``: trainer and server meet as ``gloo_transfer`` has them meet."""

from typing import Any

from pytest_trlcompat.inference.gloo_transfer import communicator

__all__ = ["StatelessProcessGroup"]


class StatelessProcessGroup:
    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int, *_: Any, **__: Any) -> Any:
        return communicator(host, port, rank, world_size)
