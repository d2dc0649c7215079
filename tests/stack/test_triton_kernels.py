"""Kernels in Triton on the software accelerator. Skipped without Triton, which the cells with Liger have."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def differences(kind: str) -> dict[str, float]:
    """Of kernels from the same numbers in PyTorch, by kernel; the largest one."""
    import torch

    from . import triton_bodies

    dtype = getattr(torch, kind)
    torch.manual_seed(0)
    x = torch.randn(64).to(dtype).to("npu")
    wanted = {
        "polynomial": x * x + x,
        "scaled": (x.float() * 0.3).to(dtype),
        "chosen": torch.where(x > 0, x, -x),
        "root": torch.rsqrt(x.float().abs() + 1).to(dtype),
        "tangent": torch.tanh(x.float()).to(dtype),
        "exponential": torch.exp(x.float()).to(dtype),
    }
    return {name: triton_bodies.off(name, x, each) for name, each in wanted.items()}


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_a_kernel_gives_the_numbers_of_pytorch(launcher: Launcher, kind: str) -> None:
    found = launcher(differences, kind, strategy="single", sharded=False).values[0]
    unit = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 0.0}[kind]
    assert {name for name, off in found.items() if off > unit} == set()


def products(kind: str) -> float:
    import torch

    from . import triton_bodies

    torch.manual_seed(0)
    left, right = (torch.randn(16, 16).to(getattr(torch, kind)).to("npu") for _ in range(2))
    return triton_bodies.product_off(left, right, left.float() @ right.float())


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_product_of_matrices_is_summed_in_float32(launcher: Launcher, kind: str) -> None:
    assert launcher(products, kind, strategy="single", sharded=False).values[0] < 1e-5


def layers(kernels: bool) -> tuple[float, list[Any], list[str]]:
    import copy
    import sys

    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config).to("npu")
    ids = torch.randint(0, 97, (2, 9)).to("npu")
    if kernels:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        model = copy.deepcopy(model)
        _apply_liger_kernel_to_instance(model=model)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    of_npus = [name for name in sys.modules if "ascend" in name and name.endswith(("rms_norm", "rope", "swiglu"))]
    return loss.item(), [parameter.grad.cpu() for parameter in model.parameters()], of_npus


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="Liger is not installed")
def test_ligers_layers_have_the_gradients_of_transformers_own_and_are_those_for_gpus(launcher: Launcher) -> None:
    plain = launcher(layers, False, strategy="single", sharded=False).values[0]
    fused = launcher(layers, True, strategy="single", sharded=False).values[0]
    assert fused[0] == pytest.approx(plain[0], rel=1e-6)
    assert max(float((one - other).abs().max()) for one, other in zip(plain[1], fused[1], strict=True)) < 1e-6
    assert fused[2] == []
