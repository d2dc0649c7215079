"""Replicas whose gradients PyTorch averages: ``DistributedDataParallel``."""

from __future__ import annotations

from typing import Any

from pytest_trlcompat.strategies.family import Family

__all__ = ["DDP"]


class DDP(Family):
    """A whole model on each rank."""

    names = ("ddp",)
    position = 20
    kind = "ddp"
    engine = ("torch.nn.parallel.distributed", "DistributedDataParallel")

    def builds_engine(self, world_size: int) -> bool:
        """Accelerate wraps a model only if there are several processes."""
        return world_size > 1

    def measure(self, engine: Any, entry: dict[str, Any]) -> None:
        count = sum(parameter.numel() for parameter in engine.module.parameters())
        entry["local"] += count
        entry["total"] += count
        entry["device_type"] = engine.device.type if engine.device is not None else None
