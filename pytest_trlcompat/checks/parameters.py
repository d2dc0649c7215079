"""Are the right parameters trainable, does the optimizer have them, and do exactly those change?

Catches a model of which nothing is trainable, adapters that are frozen, an optimizer that was made of parameters that a
wrapper has replaced since (accelerate issue 2665), weights that no step changes, and frozen ones that change. Nothing
is gathered: each rank examines its own shards, and ranks exchange one byte per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytest_trlcompat.checks._models import clean_name, local_shard, named_parameters, unwrapped, without
from pytest_trlcompat.checks._prints import fingerprints, has_bits, sample
from pytest_trlcompat.checks._ranks import CheckError, OddError, any_rank, gather_from_ranks, listed, together
from pytest_trlcompat.checks.gradients import GradientReport

__all__ = ["TOO_SMALL", "WeightsBefore", "check_finite", "check_moved", "check_trainable", "held_by", "steps_show"]

TOO_SMALL = (
    "and that rate is too small for the type of the weights to show a step at their size: keep them in float32, with "
    "mixed precision, if they are to move"
)
"""What a message adds about weights that do not change, if :func:`steps_show` is ``False``."""

_SAMPLE = 64
"""Elements of a frozen adapted weight that are kept, to tell rounding from another change."""
_ROUNDING = 8
"""Units in the last place of the largest element that merging an adapter and unmerging it may leave in a weight."""
_CLEARLY = 4
"""Times half a unit in the last place that a step has to measure before weights that stay as they were cannot be right:
an average over steps makes the steps of Adam and its like several times smaller than their learning rate."""


def check_trainable(model: nn.Module, optimizer: Any = None, *, ignore: Sequence[str] = ()) -> dict[str, int]:
    """Before training: some parameters and LoRA adapters in use are trainable, and the optimizer has all of them.

    Collective if there are several ranks.

    Args:
        model: wrapped or not, sharded or not.
        optimizer: torch's, Accelerate's or DeepSpeed's, after the model was wrapped; ``None``: it is not checked.
        ignore: shell patterns of parameters' names to leave out.

    Returns:
        Numbers of parameters: ``trainable``, ``frozen``, and ``lora`` among the trainable ones.

    Raises:
        CheckError: on every rank: nothing is trainable, or the optimizer has no trainable parameter.
        OddError: on every rank, with names: the optimizer lacks some trainable parameters, all of an adapter in use is
            frozen while other parameters train, or nothing but normalisation trains.
    """
    parameters = without(named_parameters(model), ignore)
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    lora = sum("lora_" in name for name, _ in trainable)
    counts = {"trainable": len(trainable), "frozen": len(parameters) - len(trainable), "lora": lora}
    with together("trainable parameters"):
        if not trainable:
            raise CheckError(
                f"expected parameters to train, but none of the {len(parameters)} parameters requires a gradient; "
                "call requires_grad_() on those to train, and load adapters with is_trainable=True"
            )
        odd = [_frozen_adapters(model, parameters), _normalisation_alone(model, trainable, len(parameters))]
        if optimizer is not None:
            odd.append(_lacking(optimizer, trainable))
        if texts := [text for text in odd if text is not None]:
            raise OddError("; ".join(texts), counts)
    return counts


def _frozen_adapters(model: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> str | None:
    """A part of an adapter in use may be frozen, as LoRA-FA freezes ``lora_A``, but not all of it."""
    active = _active_adapters(model)
    adapter = [(name, parameter) for name, parameter in parameters if "lora_" in name and active & set(name.split("."))]
    if not adapter or any(parameter.requires_grad for _, parameter in adapter):
        return None
    return (
        f"expected to train the LoRA adapter {', '.join(sorted(active))!r}, but its parameters "
        f"{listed(name for name, _ in adapter)} require no gradient; call model.set_adapter(...), or load the adapter "
        "with is_trainable=True"
    )


def _active_adapters(model: nn.Module) -> set[str]:
    for module in model.modules():
        adapters = getattr(module, "active_adapters", None) if hasattr(module, "peft_config") else None
        if adapters is not None:
            adapters = adapters() if callable(adapters) else adapters
            return {adapters} if isinstance(adapters, str) else set(adapters)
    return set()


def _normalisation_alone(model: nn.Module, trainable: Sequence[tuple[str, nn.Parameter]], all_: int) -> str | None:
    """The text if only normalisation trains: a pattern of names may have frozen more than was intended."""
    if len(trainable) == all_ or any(hasattr(module, "peft_config") for module in model.modules()):
        return None
    norms = {
        f"{clean_name(name)}."
        for name, module in unwrapped(model).named_modules()
        if "Norm" in type(module).__name__ and not any(module.children())
    }
    if not all(f"{name.rpartition('.')[0]}." in norms for name, _ in trainable):
        return None
    return (
        f"expected layers to train, but of the {all_} parameters nothing but normalisation requires a gradient: "
        f"{listed(name for name, _ in trainable)}. Was a pattern of names to freeze another part?"
    )


def _lacking(optimizer: Any, trainable: Sequence[tuple[str, nn.Parameter]]) -> str | None:
    held = {id(parameter) for parameter, _ in held_by(optimizer)}
    lacking = [name for name, parameter in trainable if id(parameter) not in held]
    if len(lacking) == len(trainable):
        raise CheckError(
            f"expected an optimizer of the {len(trainable)} trainable parameters, but of its {len(held)} tensors none "
            "is among them, so nothing that trains can change: a wrapper has replaced the parameters since the "
            "optimizer was made. Make it after the model is wrapped, or set fsdp_use_orig_params to true under FSDP"
        )
    if lacking:
        return (
            f"expected an optimizer with every trainable parameter, but it lacks {listed(lacking)}: they get "
            "gradients and never change; create the optimizer after the last parameter was added or wrapped"
        )
    return None


def held_by(optimizer: Any) -> list[tuple[Tensor, float]]:
    """The tensors that a possibly wrapped optimizer updates, with learning rates; DeepSpeed hides them in buffers."""
    while True:
        for name in ("bit16_groups", "fp16_groups", "bf16_groups"):  # ZeRO-1 and 2, ZeRO-3, BF16_Optimizer
            groups = getattr(optimizer, name, None)
            if groups:
                rates = [float(group["lr"]) for group in optimizer.param_groups]
                rates += [max(rates)] * (len(groups) - len(rates))  # ZeRO-3 may cut a group in several
                return [(parameter, rate) for group, rate in zip(groups, rates, strict=False) for parameter in group]
        if not hasattr(optimizer, "optimizer"):
            return [
                (parameter, float(group["lr"])) for group in optimizer.param_groups for parameter in group["params"]
            ]
        optimizer = optimizer.optimizer


class WeightsBefore:
    """Fingerprints of a model's weights, to find out after a step which of them changed.

    A fingerprint is one number of 64 bits for each parameter, computed in pieces of 32 MiB, so that no copy of the
    model is kept. It detects every change of one element, and misses any other with a probability of about 2**-64. For
    each frozen weight of adapted layers (PEFT) 64 elements are kept as well.

    Args:
        model: wrapped or not, sharded or not; each rank examines its own shards.
        most: elements of each parameter to look at, evenly spread over it; by default all.
    """

    def __init__(self, model: nn.Module, *, most: int | None = None) -> None:
        self.most = most
        self._prints = _prints(model, most)
        self._samples = {name: sample(weight, _SAMPLE).clone() for name, weight in _adapted(model)}

    def skipped(self, model: nn.Module) -> list[str]:
        """Names of the parameters that were not looked at, since they have no plain storage (torchao's quantised)."""
        return [name for name, _ in named_parameters(model) if name not in self._prints]

    def moved(self, model: nn.Module) -> set[str]:
        """Names of the parameters that changed on this rank, without those that are now sharded differently."""
        return {
            name
            for name, (shape, value) in _prints(model, self.most).items()
            if name in self._prints and self._prints[name][0] == shape and self._prints[name][1] != value
        }

    def rounded(self, model: nn.Module) -> set[str]:
        """Names of frozen weights of adapted layers of which no kept element changed by more than rounding.

        Merging an adapter and unmerging it, as TRL does to hand the weights to vLLM, leaves such a change. In quantised
        weights (integers) any change counts as rounding.
        """
        return {
            name
            for name, tensor in _adapted(model)
            if (before := self._samples.get(name)) is not None and _within_rounding(before, sample(tensor, _SAMPLE))
        }

    def zeros(self) -> set[str]:
        """Names of the parameters that were all zeros on this rank, like a new ``lora_B``."""
        return {name for name, (_, value) in self._prints.items() if value == 0}


def check_moved(
    model: nn.Module,
    before: WeightsBefore,
    gradients: GradientReport,
    *,
    optimizer: Any = None,
    ignore: Sequence[str] = (),
) -> dict[str, Any]:
    """After a step, some trainable weights and every new ``lora_B`` changed, and frozen ones are bitwise the same.

    Only ``lora_B`` is checked individually: a step of 1e-6 may not change a weight of type bfloat16, but does change a
    zero. Frozen weights of adapted layers may have been rounded: see :meth:`WeightsBefore.rounded`. Collective if there
    are several ranks.

    Args:
        model: wrapped or not, sharded or not.
        before: taken before the step.
        gradients: what :func:`check_gradients` returned before the step, whose learning rate must not have been 0.
        optimizer: parameters in its groups with a learning rate of 0 are not expected to change.
        ignore: shell patterns of parameters' names to leave out.

    Returns:
        Numbers of parameters: ``moved`` and ``frozen``; if some were not looked at, their names as ``skipped``.

    Raises:
        CheckError: on every rank: no trainable parameter changed. That may be right for weights of type bfloat16 and a
            small learning rate: judge these over several steps, and by :func:`steps_show`.
        OddError: on every rank, with names: frozen parameters changed, or a new ``lora_B`` did not.
    """
    named = without(named_parameters(model), ignore)
    with together("the weights after a step"):
        moved_here, zero_here = before.moved(model), before.zeros()
        rounded_here = before.rounded(model) if moved_here else set()
    moved = _on_some_rank(named, lambda name: name in moved_here)
    filled = _on_some_rank(named, lambda name: name not in zero_here)
    changed = _on_some_rank(named, lambda name: name in moved_here and name not in rounded_here)
    idle = set() if optimizer is None else {id(parameter) for parameter, rate in held_by(optimizer) if rate == 0}
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    trainable = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in idle]
    fresh = [name for name in trainable if "lora_B" in name and name not in filled and name in gradients.reached]
    report: dict[str, Any] = {"moved": sum(name in moved for name in trainable), "frozen": len(frozen)}
    if skipped := before.skipped(model):
        report["skipped"] = skipped
    with together("the weights after a step"):
        if trainable and not report["moved"]:
            raise CheckError(
                f"expected a step to change the trainable parameters, but none of the {len(trainable)} changed: does "
                "the optimizer have them, and does it step?",
                report,
            )
        problems = []
        if wrong := [name for name in frozen if name in changed]:
            problems.append(f"the frozen parameters {listed(wrong)} changed: is an adapter merged into them?")
        if unchanged := [name for name in fresh if name not in moved]:
            problems.append(f"{listed(unchanged)} had a gradient and did not change: does the optimizer have them?")
        if problems:
            raise OddError(
                "expected a step to change exactly the trainable parameters, but " + "; ".join(problems), report
            )
    return report


def steps_show(model: nn.Module, optimizer: Any, norm: float | None, *, ignore: Sequence[str] = ()) -> bool:
    """Whether a step at the present learning rate is large enough for the type of some trainable weights to show it.

    A bfloat16 weight of 1 has neighbours at a distance of 0.008, so steps of 1e-6 never change it, although nothing is
    wrong with gradients and optimizer. Collective if there are several ranks.

    Args:
        model: wrapped or not, sharded or not.
        optimizer: ``torch.optim.SGD`` moves a weight by the learning rate times its gradient, whose root mean square
            is taken. Any other optimizer is assumed to scale gradients, so that a step is about the learning rate.
        norm: of all gradients together, or ``None`` if it is not known; needed for SGD.
        ignore: shell patterns of parameters' names to leave out.

    Returns:
        Whether most of the trainable elements are in parameters where a step measures more than 4 times half a unit in
        the last place of their mean size; ``False`` if that cannot be known.
    """
    named = [parameter for _, parameter in without(named_parameters(model), ignore) if parameter.requires_grad]
    with together("how large a step is"):
        rates = {id(parameter): rate for parameter, rate in held_by(optimizer)}
        largest = max(rates.values(), default=0.0)
        unit = _step_per_rate(optimizer, named, norm)
        mine = [
            (rates.get(id(parameter), largest), local_shard(parameter))
            for parameter in named
            if parameter.is_floating_point()
        ]
        shown = sum(shard.numel() for rate, shard in mine if rate * unit > _CLEARLY * _half_unit(shard))
        counts = shown, sum(shard.numel() for _, shard in mine)
    shown, count = (sum(of_ranks) for of_ranks in zip(*gather_from_ranks(counts), strict=True))
    return 2 * shown > count


def _step_per_rate(optimizer: Any, named: Sequence[Tensor], norm: float | None) -> float:
    """How far a step moves a weight, for a learning rate of 1."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.SGD):
        return 1.0
    # Under ZeRO-3 a parameter that is not gathered has no elements itself.
    count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in named)
    return 0.0 if norm is None or not count else float(norm) / count**0.5


def _half_unit(weights: Tensor) -> float:
    """Half a unit in the last place of a weight of mean size."""
    return float(torch.finfo(weights.dtype).eps / 2 * weights.abs().float().mean()) if weights.numel() else 0.0


def check_finite(model: nn.Module, *, ignore: Sequence[str] = ()) -> int:
    """No trainable parameter holds NaN or infinity. Collective if there are several ranks.

    Returns:
        Number of trainable parameters.

    Raises:
        CheckError: on every rank, with names.
    """
    named = [
        (name, parameter) for name, parameter in without(named_parameters(model), ignore) if parameter.requires_grad
    ]
    with together("whether weights are finite"):
        shards = [(name, local_shard(parameter)) for name, parameter in named]
        bad_here = {name for name, shard in shards if not bool(shard.isfinite().all())}
    bad = _on_some_rank(named, lambda name: name in bad_here)
    with together("whether weights are finite"):
        if bad:
            raise CheckError(
                f"expected finite weights after a step, but NaN or infinity is in {listed(sorted(bad))}: its gradient "
                "was not finite, and the step was made all the same"
            )
    return len(named)


def _on_some_rank(named: Sequence[tuple[str, nn.Parameter]], predicate: Callable[[str], bool]) -> set[str]:
    flags = any_rank([predicate(name) for name, _ in named])
    return {name for (name, _), somewhere in zip(named, flags, strict=True) if somewhere}


def _prints(model: nn.Module, most: int | None) -> dict[str, tuple[tuple[int, ...], int]]:
    shards = [(name, shard) for name, parameter in named_parameters(model) if has_bits(shard := local_shard(parameter))]
    values = fingerprints([shard if most is None else sample(shard, most) for _, shard in shards])
    return {name: (tuple(shard.shape), value) for (name, shard), value in zip(shards, values, strict=True)}


def _adapted(model: nn.Module) -> list[tuple[str, Tensor]]:
    """This rank's shards of the frozen weights in layers that PEFT has adapted."""
    layers = [
        clean_name(name)
        for name, module in unwrapped(model).named_modules()
        if any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__)
    ]
    bases = {f"{layer}.base_layer" for layer in layers}
    return [
        (name, shard)
        for name, parameter in named_parameters(model)
        if not parameter.requires_grad
        and name.rpartition(".")[0] in bases
        and has_bits(shard := local_shard(parameter))
    ]


def _within_rounding(before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape:
        return False
    if not before.is_floating_point():
        return True
    allowed = _ROUNDING * torch.finfo(before.dtype).eps * before.abs().max().float() if before.numel() else 0.0
    return bool(((after.float() - before.float()).abs() <= allowed).all())
