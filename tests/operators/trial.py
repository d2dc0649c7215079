"""One operator of PyTorch's database, tried on the CPU and on the software accelerator with the same samples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from .comparing import DEVICE, Difference, difference, tensors_of
from .moving import Mover
from .poison import fill_new_memory

__all__ = ["operators", "try_operator"]

CPU = torch.device("cpu")
SEED = 7
HOST_ARGUMENTS = {"tensor_split"}
"""Operators that want the tensors among their arguments, but not their input, on the CPU, whatever the device."""

Value = TypeVar("Value")
Stage = Callable[[Any, Any, bool], Any]


def operators() -> dict[str, Any]:
    """The database, by name: ``nn.functional.linear``, ``as_strided.partial_views``."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}


def try_operator(
    operator: Any, dtype: torch.dtype, *, samples: int | None = None, cpu_alone: bool = False
) -> Difference | None:
    """The first difference between the device and the CPU, numbers last; None where there is none.

    Args:
        samples: at most so many of the database's, evenly spread over all; None for all.
        cpu_alone: compare nothing, and leave the device alone: for what may be the CPU's own fault.
    """
    numbers = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for different in _differences(operator, dtype, samples, cpu_alone):
            if not different.of_numbers:
                return different
            numbers = numbers or different
    return numbers


def _differences(operator: Any, dtype: torch.dtype, samples: int | None, cpu_alone: bool) -> Iterator[Difference]:
    differentiable = operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu")
    _seed()
    made = list(enumerate(operator.sample_inputs_func(operator, "cpu", dtype, differentiable)))
    for number, sample in made if samples is None else _spread(made, samples):
        for name, stage, variant in _variants(sample, number):
            on_cpu, on_device = _placed(operator, variant)
            if on_device is None:
                continue
            expected = _outcome(stage, operator, on_cpu, differentiable, memory=0x00)
            if cpu_alone:
                continue
            if name == "values" and isinstance(expected, Exception):
                yield Difference(f"sample {number}: the CPU itself raises {type(expected).__name__}: {expected}")
                continue
            found = _outcome(stage, operator, on_device, differentiable, memory=0xA5)
            different = difference(expected, found)
            if different is not None:
                yield Difference(f"sample {number}, {name}{different.text}", different.of_numbers)


def _spread(values: Sequence[Value], count: int) -> list[Value]:
    """The first and the last of them, and others at even distances between."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _variants(sample: Any, number: int) -> Iterator[tuple[str, Stage, Any]]:
    """What is done with a sample: its name, how, and the sample as it is or with its tensors in another form."""
    yield "values", _values, sample
    yield "in place", _in_place, sample
    yield "out", _out, sample
    if number == 0 and all(tensor.layout == torch.strided for tensor in tensors_of(_arguments(sample))):
        yield "not contiguous", _values, sample.noncontiguous()
    first = sample.input
    if isinstance(first, torch.Tensor) and first.is_complex() and first.layout == torch.strided:
        lazy = copy.copy(sample)
        lazy.input = torch._neg_view(first.detach().conj()).requires_grad_(first.requires_grad)
        yield "conjugated and negated", _values, lazy


def _placed(operator: Any, sample: Any) -> tuple[Any, Any]:
    """A copy of the sample on the CPU, and one on the device: None for a factory without a device argument."""
    to_cpu, to_device = Mover(CPU), Mover(DEVICE)
    on_device = _moved(sample, to_device, to_cpu if operator.name in HOST_ARGUMENTS else to_device)
    return _moved(sample, to_cpu, to_cpu), on_device if to_device.names else None


def _moved(sample: Any, mover: Mover, arguments: Mover) -> Any:
    moved = copy.copy(sample)
    moved.input = mover.move(sample.input)
    moved.args, moved.kwargs = arguments.move(sample.args), arguments.move(sample.kwargs)
    return moved


def _seed() -> None:
    """As ``torch.manual_seed`` does, which takes a millisecond with a build for CUDA."""
    torch.default_generator.manual_seed(SEED)
    torch.npu.manual_seed_all(SEED)


def _arguments(sample: Any) -> list[Any]:
    return [sample.input, sample.args, sample.kwargs]


def _outcome(stage: Stage, operator: Any, sample: Any, differentiable: bool, *, memory: int) -> Any:
    """What a stage returns, or what it raises, where new memory holds the byte ``memory``."""
    fill_new_memory(memory)
    _seed()
    try:
        return stage(operator, sample, differentiable)
    except Exception as error:
        return error


def _values(operator: Any, sample: Any, differentiable: bool) -> Any:
    """The result, which inputs it shares memory with, and the gradients of all inputs."""
    result = operator(sample.input, *sample.args, **sample.kwargs)
    inputs = list(tensors_of(_arguments(sample)))
    written = inputs if operator.name not in HOST_ARGUMENTS else [sample.input]
    outcome = {
        "result": result,
        "inputs": written,
        "shared": [_shared_with(tensor, inputs) for tensor in tensors_of(result)],
    }
    if differentiable:
        outcome["gradients"] = _gradients(sample.output_process_fn_grad(result), inputs)
    return outcome


def _in_place(operator: Any, sample: Any, differentiable: bool) -> Any:
    """The operator's in-place variant, on a copy of its input."""
    variant = operator.inplace_variant
    if variant is None or not isinstance(sample.input, torch.Tensor) or sample.broadcasts_input:
        return None
    inputs = list(tensors_of(_arguments(sample)))
    itself = sample.input.clone()
    result = variant(itself, *sample.args, **sample.kwargs)
    outcome = {"result": result, "self": itself, "same": result is itself}
    if differentiable and operator.supports_inplace_autograd:
        outcome["gradients"] = _gradients(result, inputs)
    return outcome


def _out(operator: Any, sample: Any, _differentiable: bool) -> Any:
    """The operator's ``out=``, into tensors that are too small and into such that fit but are not contiguous."""
    if not operator.supports_out:
        return None
    with torch.no_grad():
        result = operator(sample.input, *sample.args, **sample.kwargs)
        outcome = []
        makers: tuple[Callable[[Any], Any], ...] = (
            lambda one: one.new_empty(0),
            lambda one: one.new_zeros((*one.shape, 2))[..., 0],
        )
        for make in makers:
            out = make(result) if isinstance(result, torch.Tensor) else type(result)(map(make, result))
            _seed()
            operator(sample.input, *sample.args, **sample.kwargs, out=out)
            outcome.append(out)
    return outcome


def _gradients(result: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    outputs = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    inputs = [tensor for tensor in inputs if tensor.requires_grad]
    if not outputs or not inputs:
        return []
    cotangents = [_numbers_like(tensor) for tensor in outputs]
    return list(torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True))


def _numbers_like(tensor: torch.Tensor) -> torch.Tensor:
    """Different numbers of both signs, the same on every device."""
    generator = torch.Generator().manual_seed(SEED)
    real = torch.complex64 if tensor.dtype.is_complex else torch.float32
    return torch.randn(tensor.shape, dtype=real, generator=generator).to(tensor.dtype).to(tensor.device)


def _shared_with(tensor: torch.Tensor, inputs: list[torch.Tensor]) -> int | None:
    """The number of the first input whose memory this is."""
    if tensor.layout != torch.strided:
        return None
    storage = tensor.untyped_storage()._cdata
    candidates = (i for i, one in enumerate(inputs) if one.layout == torch.strided)
    return next((i for i in candidates if inputs[i].untyped_storage()._cdata == storage), None)
