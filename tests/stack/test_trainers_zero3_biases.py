"""The cure of ``lora-zero3-biases``: DeepSpeed's own gradients where it has them, and the bias's where it has not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
linear = pytest.importorskip("deepspeed.runtime.zero.linear")

from pytest_trlcompat.trainers.zero3_biases import ZeRO3BiasesMixin, _working  # noqa: E402 - part of the stack

FUNCTION = linear.LinearFunctionForZeroStage3


def trainer(stage: int | None, train: Any) -> Any:
    class Base:
        accelerator = SimpleNamespace(
            state=SimpleNamespace(deepspeed_plugin=None if stage is None else SimpleNamespace(zero_stage=stage))
        )

        def train(self) -> Any:
            return train()

    return type("Mine", (ZeRO3BiasesMixin, Base), {})()


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5)])
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_are_those_of_pytorch(shape: tuple[int, ...], frozen: bool) -> None:
    torch.manual_seed(0)
    tensors = torch.randn(shape), torch.randn(4, 5), torch.randn(4)

    def gradients(function: Any) -> list[Any]:
        inputs, weight, bias = (tensor.clone().requires_grad_() for tensor in tensors)
        weight.requires_grad_(not frozen)
        function(inputs, weight, bias).square().sum().backward()
        return [tensor.grad for tensor in (inputs, weight, bias)]

    right = gradients(torch.nn.functional.linear)
    found = trainer(3, lambda: gradients(FUNCTION.apply)).train()
    assert (found[1] is None) == frozen
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("stage", "lent"), [(3, True), (2, False), (None, False)])
def test_deepspeed_is_lent_the_function_for_a_training_under_zero3(stage: int | None, lent: bool) -> None:
    own = FUNCTION.backward
    assert trainer(stage, lambda: FUNCTION.backward is not own).train() is lent
    assert FUNCTION.backward is own


def test_other_errors_stay() -> None:
    def wrong(*_: Any) -> None:
        raise UnboundLocalError("cannot access local variable 'bias'")

    with pytest.raises(UnboundLocalError, match="'bias'"):
        _working(wrong)(None, None)
