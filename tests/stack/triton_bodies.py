"""Kernels in Triton that a test runs inside a rank. Imported only where Triton is."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["off", "product_off"]

SIZE = 64


@triton.jit
def _polynomial(x_ptr: Any, y_ptr: Any, factor: Any, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x * x + x)


@triton.jit
def _scaled(x_ptr: Any, y_ptr: Any, factor: Any, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * factor.to(tl.float32))


@triton.jit
def _chosen(x_ptr: Any, y_ptr: Any, factor: Any, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.where(x > 0, x, -x))


@triton.jit
def _root(x_ptr: Any, y_ptr: Any, factor: Any, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    tl.store(y_ptr + at, libdevice.rsqrt(tl.abs(tl.load(x_ptr + at).to(tl.float32)) + 1))


@triton.jit
def _tangent(x_ptr: Any, y_ptr: Any, factor: Any, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    tl.store(y_ptr + at, libdevice.tanh(tl.load(x_ptr + at).to(tl.float32)))


@triton.jit
def _exponential(x_ptr: Any, y_ptr: Any, factor: Any, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    tl.store(y_ptr + at, tl.exp(tl.load(x_ptr + at).to(tl.float32)))


@triton.jit
def _product(x_ptr: Any, y_ptr: Any, z_ptr: Any, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(z_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


_KERNELS = {
    "polynomial": _polynomial,
    "scaled": _scaled,
    "chosen": _chosen,
    "root": _root,
    "tangent": _tangent,
    "exponential": _exponential,
}


def off(name: str, x: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far a kernel of :data:`SIZE` numbers is from what is wanted, at most."""
    y = torch.zeros_like(x)
    _KERNELS[name][(1,)](x, y, 0.3, SIZE)
    return float((y.float() - wanted.float()).abs().max())


def product_off(left: torch.Tensor, right: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far the product of two matrices of 16 rows is from what is wanted, at most."""
    found = torch.zeros_like(wanted)
    _product[(1,)](left, right, found, left.shape[0])
    return float((found - wanted).abs().max())
