"""Kernels in Triton, such as Liger's, on the software accelerator: Triton's own interpreter runs them.

The interpreter computes a kernel with NumPy, program by program, from the same source that a GPU's compiler takes. What
it lacks is added here as its modules are imported:

- floating-point arguments stay Python's numbers, where a kernel expects a scalar of float32;
- a scalar is no index for newer NumPy;
- numbers in bfloat16 are computed with as if they were integers, and cut off instead of rounded;
- the functions of a GPU's mathematics library have no body.

Liger has its own kernels for Ascend's NPUs, and takes them wherever there is an NPU. Here it takes the kernels that run
on a GPU.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

__all__ = ["ADAPTATIONS", "use_the_interpreter"]

INTERPRETED = "TRITON_INTERPRET"
"""Triton's variable; read where a kernel is decorated."""


def use_the_interpreter() -> None:
    """Have kernels interpreted that are defined from now on, if whoever started this process has not decided it."""
    if "triton" not in sys.modules:
        os.environ.setdefault(INTERPRETED, "1")


def numbers_are_scalars(module: Any) -> None:
    """Floats among a kernel's arguments become scalars of float32, as in a compiled kernel."""
    import numpy
    import triton.language as tl

    convert: Callable[[Any], Any] = module._implicit_cvt

    @functools.wraps(convert)
    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(module.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32), tl.float32)
        return convert(argument)

    module._implicit_cvt = converted


def scalars_are_indices(module: Any) -> None:
    """A scalar can be the bound of a loop: before Triton 3.7 NumPy (from 2.4 on) refuses to make a number of one."""
    patch: Callable[..., None] = module._patch_lang_tensor

    @functools.wraps(patch)
    def patched(tensor: Any, *scope: Any) -> None:
        # When a kernel ends, this restores what was there before it, also in the place of what follows.
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    module._patch_lang_tensor = patched


def bfloat16_is_computed(module: Any) -> None:
    """Operations with numbers in bfloat16 are done in float32, and their results are rounded to the nearest."""
    import numpy
    import triton.language as tl

    convert: Callable[..., Any] = module._convert_float

    @functools.wraps(convert)
    def converted(numbers: Any, source_type: Any, target_type: Any, rounding_mode: Any) -> Any:
        if source_type != tl.float32 or target_type != tl.bfloat16:
            return convert(numbers, source_type, target_type, rounding_mode)
        rounded = torch.from_numpy(numpy.array(numbers, dtype=numpy.float32)).bfloat16()
        # NumPy has no bfloat16: the interpreter keeps its bits as unsigned integers.
        return rounded.view(torch.int16).numpy().view(numpy.uint16)

    def is_bfloat16(operand: Any) -> bool:
        return isinstance(operand, module.TensorHandle) and bool(operand.dtype.scalar == tl.bfloat16)

    def widen(builder: Any, operands: Iterable[Any]) -> list[Any]:
        return [builder.cast_impl(operand, tl.float32) if is_bfloat16(operand) else operand for operand in operands]

    def widened(operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def in_float32(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if not any(map(is_bfloat16, arguments)):
                return operation(self, *arguments, **keywords)
            result = operation(self, *widen(self, arguments), **keywords)
            # The result of a comparison is no number in float32, and stays as it is.
            return self.cast_impl(result, tl.bfloat16) if result.data.dtype == numpy.float32 else result

        return in_float32

    module._convert_float = converted
    for name in ("binary_op", "ternary_op", "unary_op", "create_erf", "create_fma", "create_rsqrt"):
        setattr(module.InterpreterBuilder, name, widened(getattr(module.InterpreterBuilder, name)))
    multiply = module.InterpreterBuilder.create_dot

    @functools.wraps(multiply)
    def dot(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return multiply(self, *widen(self, (left, right)), *others)

    module.InterpreterBuilder.create_dot = dot


def functions_are_computed(module: ModuleType) -> None:
    """What Liger's kernels take of the GPU's mathematics library, from functions that the interpreter has."""
    if os.environ.get(INTERPRETED) == "1":
        from torch_npu._triton_functions import rsqrt, tanh

        module.rsqrt, module.tanh = rsqrt, tanh  # type: ignore[attr-defined]


def no_kernels_for_npus(module: Any) -> None:
    """Liger finds no NPU."""
    module.is_npu_available = lambda: False


def autocast_is_of_this_device(module: Any) -> None:
    """Liger's functions look at this device's automatic mixed precision: CUDA's do at CUDA's."""
    for name in ("amp_custom_fwd", "amp_custom_bwd"):
        if hasattr(module, name):
            setattr(module, name, functools.partial(getattr(torch.amp, name.removeprefix("amp_")), device_type="npu"))


ADAPTATIONS: dict[str, tuple[Callable[[ModuleType], None], ...]] = {
    "triton.runtime.interpreter": (numbers_are_scalars, scalars_are_indices, bfloat16_is_computed),
    "triton.language.extra.libdevice": (functions_are_computed,),
    "liger_kernel.utils": (no_kernels_for_npus,),
    "liger_kernel.ops.utils": (autocast_is_of_this_device,),
}
"""What is done to each module once it has been imported."""
