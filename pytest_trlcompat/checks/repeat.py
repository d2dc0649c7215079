"""Is a model's output the same function of a batch each time?

Catches dropout that eval mode leaves on (transformers 33844, by TrainCheck), and whatever else draws random numbers or
keeps state between forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pytest_trlcompat.checks._ranks import CheckError, together
from pytest_trlcompat.trainers.logprobs.logits_to_keep import dropout_off

__all__ = ["check_repeatable"]

_UNITS = 16
"""Units in the last place of the largest output that the order of additions may account for."""


def check_repeatable(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, float]:
    """Two forwards in eval mode give the same output; collective with a sharded model (FSDP, ZeRO-3).

    Runs these two forwards. Afterwards modes and the state of the random number generators are as before.

    Args:
        model: wrapped or not.
        args, kwargs: a batch, as the trainer gives it to the model.

    Returns:
        ``outputs``, the number of tensors compared, and ``max_difference``, the largest, relative to the largest
        element of its tensor.

    Raises:
        CheckError: on every rank: an output differs by more than rounding explains.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    accelerators = [] if device.type == "cpu" else [device.index or 0]
    outputs = []
    # It saves the CPU's state in any case, and without devices that one alone.
    draws = torch.random.fork_rng(accelerators, device_type=device.type if accelerators else "cuda")
    with draws, torch.no_grad(), dropout_off(model):
        for _ in range(2):
            outputs.append([output.detach().clone() for output in _tensors(model(*args, **kwargs))])
    with together("whether the loss is a function of the batch"):
        largest = 0.0
        for first, second in zip(*outputs, strict=True):
            scale = first.abs().max().item() if first.numel() else 0.0
            off = (first.double() - second.double()).abs().max().item() / scale if scale else 0.0
            allowed = _UNITS * float(torch.finfo(first.dtype).eps)
            if not off <= allowed:
                raise CheckError(
                    f"expected the same output for the same batch in eval mode, but two forwards differ by {off:.2g} "
                    f"of the largest element; rounding explains {allowed:.2g}. Is dropout on in eval mode, or is "
                    "something kept between forwards?"
                )
            largest = max(largest, off)
    return {"outputs": len(outputs[0]), "max_difference": largest}


def _tensors(output: Any) -> Iterator[Tensor]:
    """Floating-point tensors of an output at its first level, like a loss and logits."""
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else [output]
    )
    yield from (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
