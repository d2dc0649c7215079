"""Are the right parameters trainable, and do exactly those change?

Catches frozen adapters, parameters that the optimizer does not have, weights that no step changes, and frozen ones that
change. Nothing is gathered: each rank examines its own shards, and ranks exchange one byte per parameter.

Imports torch, and of this package the modules with an underscore and ``gradients``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytest_trlcompat.checks._models import local_shard, named_parameters, without
from pytest_trlcompat.checks._ranks import CheckError, any_rank, listed, together
from pytest_trlcompat.checks.gradients import GradientReport

__all__ = ["WeightsBefore", "check_moved", "check_trainable"]

_CHUNK = 1 << 22
"""Elements of 8 bytes that a fingerprint processes at once."""


def check_trainable(model: nn.Module, optimizer: Any = None, *, ignore: Sequence[str] = ()) -> dict[str, int]:
    """Before training: something is trainable, LoRA adapters in use are, and the optimizer has all that is.

    Collective if there are several ranks.

    Args:
        model: wrapped or not, sharded or not.
        optimizer: torch's, Accelerate's or DeepSpeed's, after the model was wrapped; ``None`` leaves it out.
        ignore: shell patterns of parameters' names to leave out.

    Returns:
        Numbers of parameters: ``trainable``, ``frozen``, and ``lora`` among the trainable ones.

    Raises:
        CheckError: on every rank, with names.
    """
    parameters = without(named_parameters(model), ignore)
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    with together("trainable parameters"):
        if not trainable:
            raise CheckError(
                f"expected parameters to train, but none of the {len(parameters)} parameters requires a gradient; "
                "call requires_grad_() on those to train, and load adapters with is_trainable=True"
            )
        _adapters_are_trainable(model, parameters)
        if optimizer is not None:
            _optimizer_holds(optimizer, trainable)
    lora = sum("lora_" in name for name, _ in trainable)
    return {"trainable": len(trainable), "frozen": len(parameters) - len(trainable), "lora": lora}


def _adapters_are_trainable(model: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    active = _active_adapters(model)
    frozen = [
        name
        for name, parameter in parameters
        if "lora_" in name and not parameter.requires_grad and active & set(name.split("."))
    ]
    if frozen:
        raise CheckError(
            f"expected to train the LoRA adapter {', '.join(sorted(active))!r}, but its parameters {listed(frozen)} "
            "require no gradient; call model.set_adapter(...), or load the adapter with is_trainable=True"
        )


def _active_adapters(model: nn.Module) -> set[str]:
    for module in model.modules():
        adapters = getattr(module, "active_adapters", None) if hasattr(module, "peft_config") else None
        if adapters is not None:
            adapters = adapters() if callable(adapters) else adapters
            return {adapters} if isinstance(adapters, str) else set(adapters)
    return set()


def _optimizer_holds(optimizer: Any, trainable: Iterable[tuple[str, nn.Parameter]]) -> None:
    held = {id(parameter) for parameter in _held_by(optimizer)}
    left_out = [name for name, parameter in trainable if id(parameter) not in held]
    if left_out:
        raise CheckError(
            f"expected an optimizer with every trainable parameter, but it lacks {listed(left_out)}: they get "
            "gradients and never change; create the optimizer after the last parameter was added or wrapped"
        )


def _held_by(optimizer: Any) -> list[Tensor]:
    """The parameters that a possibly wrapped optimizer updates; DeepSpeed's hides them behind flat buffers."""
    while True:
        for groups in ("bit16_groups", "fp16_groups", "bf16_groups"):  # ZeRO-1 and 2, ZeRO-3, BF16_Optimizer
            held = getattr(optimizer, groups, None)
            if held:
                return [parameter for group in held for parameter in group]
        if not hasattr(optimizer, "optimizer"):
            return [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer = optimizer.optimizer


class WeightsBefore:
    """Fingerprints of a model's weights, to find out after a step which of them changed.

    A fingerprint is one number of 64 bits for each parameter, computed in pieces of 32 MiB, so that no copy of the
    model is kept. It detects every change of one element, and misses any other with a probability of about 2**-64.

    Args:
        model: wrapped or not, sharded or not; each rank examines its own shards.
    """

    def __init__(self, model: nn.Module) -> None:
        self._prints = _fingerprints(model)

    def moved(self, model: nn.Module) -> set[str]:
        """Names of the parameters that changed on this rank, without those that are now sharded differently."""
        return {
            name
            for name, (shape, value) in _fingerprints(model).items()
            if name in self._prints and self._prints[name][0] == shape and self._prints[name][1] != value
        }

    def zeros(self) -> set[str]:
        """Names of the parameters that were all zeros on this rank, like a new ``lora_B``."""
        return {name for name, (_, value) in self._prints.items() if value == 0}


def check_moved(
    model: nn.Module, before: WeightsBefore, gradients: GradientReport, *, ignore: Sequence[str] = ()
) -> dict[str, int]:
    """After a step, frozen weights are bitwise as before, and some trainable ones and every new ``lora_B`` changed.

    Only ``lora_B`` is checked individually: a step of 1e-6 may not change a weight of type bfloat16, but does change a
    zero. Collective if there are several ranks.

    Args:
        model: wrapped or not, sharded or not.
        before: taken before the step.
        gradients: what :func:`check_gradients` returned before the step, whose learning rate must not have been 0.
        ignore: shell patterns of parameters' names to leave out.

    Returns:
        Numbers of parameters: ``moved`` and ``frozen``.

    Raises:
        CheckError: on every rank, with names.
    """
    named = without(named_parameters(model), ignore)
    with together("the weights after a step"):
        moved_here, zero_here = before.moved(model), before.zeros()
    moved = _on_some_rank(named, lambda name: name in moved_here)
    filled = _on_some_rank(named, lambda name: name not in zero_here)
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    trainable = [name for name, parameter in named if parameter.requires_grad]
    fresh = [name for name in trainable if "lora_B" in name and name not in filled and name in gradients.reached]
    with together("the weights after a step"):
        problems = []
        if changed := [name for name in frozen if name in moved]:
            problems.append(f"the frozen parameters {listed(changed)} changed: is an adapter merged into them?")
        if not any(name in moved for name in trainable):
            problems.append(f"none of the {len(trainable)} trainable parameters changed: does the optimizer have them?")
        elif unchanged := [name for name in fresh if name not in moved]:
            problems.append(f"{listed(unchanged)} had a gradient and did not change: does the optimizer have them?")
        if problems:
            raise CheckError("expected a step to change exactly the trainable parameters, but " + "; ".join(problems))
    return {"moved": sum(name in moved for name in trainable), "frozen": len(frozen)}


def _on_some_rank(named: Sequence[tuple[str, nn.Parameter]], predicate: Callable[[str], bool]) -> set[str]:
    flags = any_rank([predicate(name) for name, _ in named])
    return {name for (name, _), somewhere in zip(named, flags, strict=True) if somewhere}


def _fingerprints(model: nn.Module) -> dict[str, tuple[tuple[int, ...], int]]:
    shards = [(name, local_shard(parameter)) for name, parameter in named_parameters(model)]
    return {name: (tuple(shard.shape), int(_fingerprint(shard))) for name, shard in shards}


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fingerprint(tensor: Tensor) -> Tensor:
    """A weighted sum, modulo 2**64, of a tensor's bits; weights are odd, so that no change of one element cancels."""
    bits = tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        piece = bits[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=tensor.device)
        weights.mul_(-7046029254386353131).bitwise_or_(1)
        total += (piece * weights).sum()
    return total
