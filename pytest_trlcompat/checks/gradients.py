"""Do gradients reach every trainable parameter, finite and not all zeros?

Known bugs that it catches: trl 3150 and 3089, of LoRA with gradient checkpointing, where they end without an error
because something beyond the checkpointed layers is trained as well.

Nothing is gathered: each rank looks at its own shards, and ranks exchange a byte per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytest_trlcompat.checks._models import clean_name, local_shard, named_parameters, unwrapped, without
from pytest_trlcompat.checks._ranks import CheckError, OddError, any_rank, listed, together

__all__ = [
    "ADVICE",
    "GradientReport",
    "Owners",
    "check_gradients",
    "complaint",
    "read_gradients",
    "zero_beside_others",
]

_THERE, _NOT_FINITE, _NOT_ZERO = 1, 2, 4


@dataclass(frozen=True)
class GradientReport:
    """What a backward left, over all ranks: names of trainable parameters.

    Attributes:
        reached: with a finite gradient that is not all zeros.
        zero: with a gradient of zeros, as ``lora_A`` has at the first step. If gradients are sharded (FSDP1, ZeRO), a
            missing gradient looks the same.
        missing: without any gradient.
        not_finite: with a gradient that holds NaN or infinity.
    """

    reached: tuple[str, ...]
    zero: tuple[str, ...]
    missing: tuple[str, ...]
    not_finite: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """The number of trainable parameters."""
        return len(self.reached) + len(self.zero) + len(self.missing) + len(self.not_finite)

    @property
    def all_zero(self) -> bool:
        """Whether no gradient differs from zero, as GRPO's do when all rewards of each group are equal."""
        return not self.reached and not self.not_finite


def check_gradients(
    model: nn.Module, *, ignore: Sequence[str] = (), allow_zero: bool = False, allow_overflow: bool = False
) -> GradientReport:
    """Every trainable parameter has a finite gradient, and every module one that is not all zeros; after backward.

    An adapted layer and its adapter (PEFT) count as one module: in a new LoRA adapter only ``lora_B`` has a gradient
    other than zero at the first step.

    Under DeepSpeed call it between the engine's ``backward`` and ``step``, at a boundary of gradient accumulation.
    Accelerate's ``backward`` does both, so use :class:`~pytest_trlcompat.checks.CompatCallback` with Accelerate.
    Without DeepSpeed call it before the optimizer's ``step``. Collective if there are several ranks.

    Args:
        model: wrapped or not, sharded or not.
        ignore: shell patterns of parameters' names to leave out, such as experts that no token was sent to.
        allow_zero: accept that all gradients are zeros, as GRPO's are when all rewards of each group are equal.
        allow_overflow: accept NaN and infinity, as the first steps of loss scaling (fp16) meet.

    Raises:
        CheckError: on every rank, with names: gradients are not finite, or nothing but zeros came to any parameter.
        OddError: on every rank, with names: some parameters were not reached while others were. A batch may leave out a
            part on purpose, such as a vision tower without an image; the callback knows which modules took part.
    """
    report = read_gradients(model, ignore=ignore)
    certain, odd = [], []
    if report.not_finite and not allow_overflow:
        certain.append(f"NaN or infinity came to {listed(report.not_finite)}")
    if report.all_zero and not allow_zero:
        certain.append(f"nothing but zeros came to {listed(report.zero)}: is the loss constant or detached?")
    if report.missing:
        odd.append(f"none came to {listed(report.missing)}: the graph does not lead there; {ADVICE}")
    if names := zero_beside_others(model, report):
        odd.append(f"nothing but zeros came to {listed(names)} while others were reached; {ADVICE}")
    # The same on all ranks, since they exchanged their flags.
    if certain or odd:
        raise (CheckError if certain else OddError)(complaint(report, [*odd, *certain]), report)
    return report


ADVICE = "with gradient checkpointing and LoRA call model.enable_input_require_grads() or use_reentrant=False"


def complaint(report: GradientReport, problems: Sequence[str]) -> str:
    """The message of an error."""
    return f"expected a gradient for each of the {report.parameters} trainable parameters, but " + "; ".join(problems)


def read_gradients(model: nn.Module, *, ignore: Sequence[str] = ()) -> GradientReport:
    """What the last backward left, without judging it; collective if there are several ranks.

    Raises:
        OddError: on every rank: a gradient could not be read.
    """
    named = [(name, parameter) for name, parameter in named_parameters(model) if parameter.requires_grad]
    named = without(named, ignore)
    with together("gradients"):
        here = _judged([local_gradient(parameter) for _, parameter in named])
    return _report([name for name, _ in named], any_rank(here))


def zero_beside_others(model: nn.Module, report: GradientReport) -> list[str]:
    """Names with zero gradients, of modules in which every gradient is zero while other modules are reached."""
    if not report.reached:
        return []
    owners = Owners(model)
    reached = {owners.of(name) for name in report.reached}
    return [name for name in report.zero if owners.of(name) not in reached]


class Owners:
    """The module to which a parameter counts: the adapted layer (PEFT) around it, or else its own module."""

    def __init__(self, model: nn.Module) -> None:
        self._adapted = {
            clean_name(name)
            for name, module in unwrapped(model).named_modules()
            if any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__)
        }

    def of(self, name: str) -> str:
        """The name of the module, by the parameter's name."""
        parts = name.split(".")
        prefixes = [".".join(parts[:length]) for length in range(1, len(parts))]
        return next((prefix for prefix in prefixes if prefix in self._adapted), prefixes[-1] if prefixes else "")


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """What this rank holds of a parameter's reduced gradient, or ``None`` if it holds nothing."""
    if hasattr(parameter, "_z3_optimizer"):
        from deepspeed.utils import safe_get_local_grad

        try:
            gradient: Tensor | None = safe_get_local_grad(parameter)
        except KeyError:  # DeepSpeed keeps none for a parameter that its optimizer lacks
            return None
        return gradient
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:  # ZeRO-1, ZeRO-2, BF16_Optimizer
        return _zero_fragment(mapping, parameter._index_in_param_group)
    return None if parameter.grad is None else local_shard(parameter.grad)


def _zero_fragment(mapping: Any, index: int) -> Tensor:
    if hasattr(mapping, "get_lp_grad_fragment"):
        fragment: Tensor = mapping.get_lp_grad_fragment(index)
    else:  # DeepSpeed before 0.16 (deepspeed/utils/tensor_fragment.py, get_full_hp_grad)
        gradients = mapping.offload_gradient_dict if mapping.use_offload else mapping.gradient_dict
        fragment = gradients[mapping.param_group_index][index]
    return fragment


def _judged(gradients: Sequence[Tensor | None]) -> list[int]:
    """Bits for each gradient, brought to the host in one copy for each device."""
    largest = [None if gradient is None or gradient.numel() == 0 else _largest(gradient) for gradient in gradients]
    bits = [0] * len(gradients)
    for device in {norm.device for norm in largest if norm is not None}:
        indices = [index for index, norm in enumerate(largest) if norm is not None and norm.device == device]
        values = torch.stack([norm for norm in largest if norm is not None and norm.device == device])
        for index, value, finite in zip(indices, values.tolist(), values.isfinite().tolist(), strict=True):
            bits[index] = _THERE | (0 if finite else _NOT_FINITE) | (_NOT_ZERO if value != 0 else 0)
    return bits


def _largest(gradient: Tensor) -> Tensor:
    """The largest absolute element, or NaN if there is one."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
        if gradient.numel() == 0:  # no row of the embedding was used; the norm of nothing is an error
            return gradient.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(gradient.detach().float(), ord=float("inf"))


def _report(names: Sequence[str], bits: Sequence[int]) -> GradientReport:
    kinds: dict[str, list[str]] = {"reached": [], "zero": [], "missing": [], "not_finite": []}
    for name, bit in zip(names, bits, strict=True):
        if not bit & _THERE:
            kinds["missing"].append(name)
        elif bit & _NOT_FINITE:
            kinds["not_finite"].append(name)
        else:
            kinds["reached" if bit & _NOT_ZERO else "zero"].append(name)
    return GradientReport(**{kind: tuple(kind_names) for kind, kind_names in kinds.items()})
