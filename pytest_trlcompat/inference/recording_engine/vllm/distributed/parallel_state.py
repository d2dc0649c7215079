"""``vllm.distributed.parallel_state``."""

from types import SimpleNamespace

__all__ = ["get_world_group"]


def get_world_group() -> SimpleNamespace:
    """The engine is alone."""
    return SimpleNamespace(rank=0, world_size=1)
