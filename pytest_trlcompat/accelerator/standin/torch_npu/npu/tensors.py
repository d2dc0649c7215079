"""``torch.npu.FloatTensor([1.0])`` and its fellows, which DeepSpeed calls for norms and overflows."""

from __future__ import annotations

import functools

import torch

__all__ = [
    "BFloat16Tensor",
    "BoolTensor",
    "ByteTensor",
    "CharTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "ShortTensor",
]

BFloat16Tensor = functools.partial(torch.tensor, dtype=torch.bfloat16, device="npu")
BoolTensor = functools.partial(torch.tensor, dtype=torch.bool, device="npu")
ByteTensor = functools.partial(torch.tensor, dtype=torch.uint8, device="npu")
CharTensor = functools.partial(torch.tensor, dtype=torch.int8, device="npu")
DoubleTensor = functools.partial(torch.tensor, dtype=torch.float64, device="npu")
FloatTensor = functools.partial(torch.tensor, dtype=torch.float32, device="npu")
HalfTensor = functools.partial(torch.tensor, dtype=torch.float16, device="npu")
IntTensor = functools.partial(torch.tensor, dtype=torch.int32, device="npu")
LongTensor = functools.partial(torch.tensor, dtype=torch.int64, device="npu")
ShortTensor = functools.partial(torch.tensor, dtype=torch.int16, device="npu")
