"""Bodies that several test modules launch: they run inside the ranks and import the stack there."""

from __future__ import annotations

from typing import Any

ELEMENTS = 4 * 32 * 32  # four square layers


def train_step() -> dict[str, Any]:
    """Accelerate wraps a small model as the strategy says; one step on a batch that depends on the rank."""
    import torch
    from accelerate import Accelerator
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accelerator = Accelerator()
    if accelerator.state.deepspeed_plugin is not None:
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
    model, optimizer = accelerator.prepare(model, optimizer)
    rank = accelerator.process_index
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(2, 4, 32, generator=generator)[rank % 2].to(accelerator.device)
    losses = []
    for _ in range(3):
        loss = (model(batch) - 1).square().mean() / 8  # gradients below the norm at which DeepSpeed clips
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return {"losses": losses, "rank": rank, "device": str(accelerator.device)}


def meet() -> tuple[int, Any]:
    """Initialise the process group; return this rank's number and its device."""
    import torch
    from accelerate import PartialState

    state = PartialState()
    torch.distributed.barrier()
    return state.process_index, state.device


def all_reduce() -> float:
    """The sum of 1 to the world size."""
    import torch

    rank, device = meet()
    value = torch.full((1,), float(rank + 1), device=device)
    torch.distributed.all_reduce(value)
    return value.item()
