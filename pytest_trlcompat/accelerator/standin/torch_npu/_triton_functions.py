"""Functions of the GPU's mathematics library for Triton's interpreter. Imported only where Triton is."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["rsqrt", "tanh"]


@triton.jit
def rsqrt(x: Any) -> Any:
    """One over the square root."""
    return tl.rsqrt(x)


@triton.jit
def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return 2 * tl.sigmoid(2 * x) - 1
