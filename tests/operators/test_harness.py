"""The comparison itself: planted faults of every kind are found, and what is equal is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pytest_trlcompat.accelerator import activate

activate(devices=2)

from torch.testing._internal.opinfo.core import SampleInput  # noqa: E402 - imports what the device has to precede

from .comparing import DEVICE, difference  # noqa: E402
from .moving import Mover  # noqa: E402
from .trial import try_operator  # noqa: E402

CPU = torch.arange(6.0).reshape(2, 3)
NPU = CPU.to(DEVICE)


def text(expected: Any, found: Any) -> str | None:
    """The difference's text."""
    different = difference(expected, found)
    return different.text if different else None


# ---- comparing


def test_equal_values_do_not_differ() -> None:
    nan = torch.tensor([float("nan"), -0.0])
    for expected in (CPU, CPU.t(), nan, CPU.to_sparse(), CPU.to_sparse_csr(), CPU.bool(), CPU[:0], CPU[0, 0]):
        assert difference(expected, Mover(DEVICE).move(expected)) is None
    assert difference({"a": [1, CPU]}, {"a": [1, NPU]}) is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (NPU + 2**-20, ": 6 of 6 numbers differ, by 9.54e-07 at most"),
        (NPU * -1 * -1 + 0, None),
        (torch.where(NPU == 0, -0.0, NPU), ": 1 of 6 numbers differ, by 0 at most"),
        (CPU, ": on cpu instead of npu:0"),
        (CPU.to("npu:1"), ": on npu:1 instead of npu:0"),
        (NPU.double(), ": dtype torch.float64 instead of torch.float32"),
        (NPU.flatten(), ": shape (6,) instead of (2, 3)"),
        (NPU.t().contiguous().t(), ": strides (1, 2) instead of (3, 1)"),
        (torch._neg_view(-NPU), ": negative bit True instead of False"),
        (NPU.clone().requires_grad_(), ": requires_grad True instead of False"),
        (NPU.to_sparse(), ": layout torch.sparse_coo instead of torch.strided"),
    ],
)
def test_the_difference_of_a_tensor_is_described(found: torch.Tensor, expected: str | None) -> None:
    assert text(CPU, found) == expected


def test_other_values_are_named_by_their_location() -> None:
    assert text({"a": [1.0]}, {"a": [2.0]}) == "['a'][0]: 2.0 instead of 1.0"
    assert text([CPU], []) == ": 0 values instead of 1"
    assert text({"a": 1}, {"b": 1}) == ": the keys ['b'] instead of ['a']"
    assert text(None, NPU[0, 0]) == ": Tensor 0.0 instead of NoneType None"
    assert text(ValueError("on cpu"), ValueError("on npu:0")) is None
    assert text(ValueError("x"), TypeError("x")) == ": TypeError: x instead of ValueError: x"
    assert text(ValueError("x"), NPU[0, 0]) == ": Tensor 0.0 instead of ValueError x"
    sparse = NPU.to_sparse() * 2
    assert text(CPU.to_sparse(), sparse) == "._values: 5 of 5 numbers differ, by 5 at most"


def test_numbers_are_described_last() -> None:
    expected, found = [CPU, CPU], [NPU + 1, NPU.t().contiguous().t()]
    assert text(expected, found) == "[1]: strides (1, 2) instead of (3, 1)"
    different = difference(expected, [NPU + 1, NPU])
    assert different is not None
    assert different.of_numbers


# ---- moving


def test_what_shares_memory_shares_it_on_the_device() -> None:
    base = torch.arange(10.0)
    first, second = Mover(DEVICE).move((base[2:8:2], base[4:]))
    second[0] = 100.0
    assert first.tolist() == [2.0, 100.0, 6.0]
    assert (first.stride(), first.storage_offset(), base[4].item()) == ((2,), 2, 4.0)


def test_lazy_bits_gradients_and_devices_are_moved() -> None:
    lazy = torch.view_as_complex(CPU.reshape(3, 2)).conj().requires_grad_()
    mover = Mover(DEVICE)
    moved = mover.move({"a": lazy, "where": "cpu", "as": torch.device("cpu"), "other": "cp"})
    assert moved["a"].is_conj()
    assert moved["a"].requires_grad
    assert (moved["where"], moved["as"], moved["other"]) == ("npu:0", DEVICE, "cp")
    assert difference(lazy, moved["a"]) is None
    assert mover.names == 3


# ---- trying


@dataclass
class Planted:
    """Stands for an entry of the database, whose operator is one of the faulty ones below."""

    function: Callable[..., Any]
    inplace_variant: Callable[..., Any] | None = None
    supports_out: bool = False
    name: str = "planted"
    supports_autograd: bool = True
    supports_inplace_autograd: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def supported_backward_dtypes(self, _device: str) -> list[torch.dtype]:
        return [torch.float32, torch.complex64]

    def sample_inputs_func(
        self, _operator: Any, device: str, dtype: torch.dtype, requires_grad: bool
    ) -> Iterator[SampleInput]:
        for number in range(6):
            yield SampleInput(CPU.to(device, dtype, copy=True).add_(number).requires_grad_(requires_grad))


def on_device(tensor: torch.Tensor) -> bool:
    return tensor.device == DEVICE


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 if on_device(grad) else grad


def only_large(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if on_device(x) and x.real.max() > 9 else x.clone()


def writes_input(x: torch.Tensor) -> torch.Tensor:
    result = x.detach().exp()
    if on_device(x):
        x.detach()[0, 0] = 50
    return result


def raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(f"on {x.device}")


def leaves_out(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    result = x.exp()
    if out is None:
        return result
    return out.resize_(x.shape) if on_device(x) else out.resize_(x.shape).copy_(result)


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (Planted(torch.exp, torch.Tensor.exp_, supports_out=True), None),
        (Planted(lambda x: x + on_device(x)), "sample 0, values['result']: 6 of 6 numbers differ, by 1 at most"),
        (Planted(lambda x: x.cpu()), "sample 0, values['result']: on cpu instead of npu:0"),
        (Planted(WrongGradient.apply), "sample 0, values['gradients'][0]: 6 of 6 numbers differ, by "),
        (Planted(only_large), "sample 5, values['result']: 6 of 6 numbers differ, by 1 at most"),
        (Planted(writes_input), "sample 0, values['inputs'][0]: 1 of 6 numbers differ, by 50 at most"),
        (Planted(raises), "sample 0: the CPU itself raises RuntimeError: on cpu"),
        (Planted(lambda x: raises(x) if on_device(x) else x.clone()), "values: RuntimeError on npu:0 instead of dict"),
        (Planted(lambda x: x.clone() if on_device(x) else x.view(-1).view(2, 3)), "values['shared'][0]: NoneType None"),
        (Planted(lambda x: x * 0 + torch.empty_like(x)), "sample 0, values['result']: 6 of 6 numbers differ"),
        (
            Planted(torch.exp, lambda x: x.exp() if on_device(x) else x.exp_()),
            "sample 0, in place['same']: False instead of True",
        ),
        (
            Planted(torch.exp, lambda x: x.mul_(2) if on_device(x) else x.exp_()),
            "sample 0, in place['result']: 6 of 6 numbers differ",
        ),
        (Planted(leaves_out, supports_out=True), "sample 0, out[0]: 6 of 6 numbers differ"),
        (Planted(lambda x: x.clone() + (on_device(x) and x.stride(1) != 1)), "sample 0, not contiguous['result']: "),
    ],
)
def test_a_planted_fault_is_found(operator: Planted, expected: str | None) -> None:
    different = try_operator(operator, torch.float32, samples=4)
    assert (different is None) == (expected is None)
    if different is not None:
        assert str(expected) in different.text


def test_complex_numbers_are_tried_conjugated_and_negated_too() -> None:
    wrong = Planted(lambda x: x.resolve_neg() + (on_device(x) and x.is_conj()))
    different = try_operator(wrong, torch.complex64)
    assert different is not None
    assert different.text == "sample 0, conjugated and negated['result']: 6 of 6 numbers differ, by 1 at most"


def test_with_cpu_alone_the_device_is_not_tried() -> None:
    assert try_operator(Planted(lambda x: x + on_device(x)), torch.float32, cpu_alone=True) is None
