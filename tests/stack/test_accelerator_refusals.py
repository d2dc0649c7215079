"""The software accelerator refuses what a GPU refuses, and allows what a GPU allows."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher

from .accelerator_bodies import beside_two_devices

SAME_DEVICE = "Expected all tensors to be on the same device"
NO_SUCH_DEVICE = "invalid device ordinal 9: the software accelerator has 2 device(s), npu:0 to npu:1"
# n is on npu:0 and c on the CPU, both (4, 4) of floats; ni and ci are indices (4,); F is torch.nn.functional.
REFUSED = {
    "n + c": SAME_DEVICE,
    "c + n": SAME_DEVICE,
    "n - c": SAME_DEVICE,
    "n * c": SAME_DEVICE,
    "n / c": SAME_DEVICE,
    "n**c": SAME_DEVICE,
    "n == c": SAME_DEVICE,
    "n < c": SAME_DEVICE,
    "n @ c": SAME_DEVICE,
    "n.add_(c)": SAME_DEVICE,
    "c.add_(n)": SAME_DEVICE,
    "n + n.to('npu:1')": SAME_DEVICE,
    "torch.add(n, n, out=c)": SAME_DEVICE,
    "torch.maximum(n, c)": SAME_DEVICE,
    "torch.clamp(n, min=c)": SAME_DEVICE,
    "torch.lerp(n, n, c)": SAME_DEVICE,
    "torch.addcmul(n, n, c)": SAME_DEVICE,
    "torch._foreach_add([n, n], [n, c])": SAME_DEVICE,
    "torch.bmm(n[None], c[None])": SAME_DEVICE,
    "torch.addmm(c, n, n)": SAME_DEVICE,
    "torch.dot(n[0], c[0])": SAME_DEVICE,
    "torch.einsum('ij,kj->ik', n, c)": SAME_DEVICE,
    "torch.cat([n, c])": SAME_DEVICE,
    "torch.stack([n, c])": SAME_DEVICE,
    "torch.where(n > 0, n, c)": SAME_DEVICE,
    "torch.where(c > 0, n, n)": SAME_DEVICE,
    "torch.isin(ni, ci)": SAME_DEVICE,
    "torch.searchsorted(n[0], c[0])": SAME_DEVICE,
    "n.masked_fill(c > 0, 0.0)": SAME_DEVICE,
    "n.masked_select(c > 0)": SAME_DEVICE,
    "n.gather(1, ci[:, None])": SAME_DEVICE,
    "n.scatter(1, ni[:, None], c)": SAME_DEVICE,
    "n.index_select(0, ci)": SAME_DEVICE,
    "n.index_put((ni,), c)": SAME_DEVICE,
    "n.index_add(0, ni, c)": "self, index and source expected to be in the same device",
    "c[ni]": "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    "F.linear(n, c)": SAME_DEVICE,
    "F.linear(n, n, c[0])": SAME_DEVICE,
    "F.embedding(ci, n)": SAME_DEVICE,
    "F.embedding(ni, c)": SAME_DEVICE,
    "F.layer_norm(n, (4,), c[0])": SAME_DEVICE,
    "F.conv1d(n[None], c[:, :, None])": SAME_DEVICE,
    "F.mse_loss(n, c)": SAME_DEVICE,
    "F.cross_entropy(n, ci)": SAME_DEVICE,
    "F.scaled_dot_product_attention(n, n, n, attn_mask=c)": SAME_DEVICE,
    "n.set_(c.untyped_storage())": 'a tensor on device "npu:0" to a storage on different device "cpu"',
    "setattr(n, 'grad', c)": "ensure that the gradient and the tensor are on the same device",
    "torch.randn(4, device='npu', generator=torch.Generator())": "Expected a 'npu:0' device type for generator",
    "torch.arange(4, device='npu:9')": NO_SUCH_DEVICE,
    "c.to('npu:9')": NO_SUCH_DEVICE,
    "torch.npu.set_device(9)": NO_SUCH_DEVICE,
}


def evaluate_all(expressions: list[str], device_type: str = "npu") -> dict[str, str]:
    """What each expression raised, as text."""
    import torch

    def evaluate(expression: str) -> str:
        names = {"torch": torch, "F": torch.nn.functional}
        for prefix, device in (("n", f"{device_type}:0"), ("c", "cpu")):
            names[prefix] = torch.rand(4, 4, device=device)
            names[f"{prefix}i"] = torch.arange(4, device=device)
        try:
            return f"no error: {eval(expression, names)}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return {expression: evaluate(expression) for expression in expressions}


@pytest.fixture(scope="module")
def raised(launch: Launcher) -> dict[str, str]:
    found: dict[str, str] = beside_two_devices(launch, evaluate_all, list(REFUSED))
    return found


@pytest.mark.parametrize("expression", REFUSED)
def test_mixed_devices_are_refused(raised: dict[str, str], expression: str) -> None:
    assert raised[expression].startswith("RuntimeError: ")
    assert REFUSED[expression] in raised[expression]


def test_what_a_gpu_allows_between_devices(launch: Launcher) -> None:
    def allowed() -> list[Any]:
        import torch

        n, c = torch.ones(4, 4, device="npu:0"), torch.full((4, 4), 2.0)
        n[1] = c[1]  # copying
        return [
            (n + torch.tensor(1.0)).sum().item(),  # a number of the CPU
            n[torch.tensor([0, 1])].sum().item(),  # indices of the CPU
            n.to("npu:1").device.index,
            torch.empty(4, 4).copy_(n).sum().item(),
        ]

    assert beside_two_devices(launch, allowed) == [36.0, 12.0, 1, 20.0]
