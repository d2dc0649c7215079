"""The cure of ``lora-zero3-biases``: DeepSpeed's own gradients where it has them, and the bias's where it has not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
linear = pytest.importorskip("deepspeed.runtime.zero.linear")

from pytest_trlcompat.trainers.deepspeed import zero3_biases  # noqa: E402 - part of the stack
from pytest_trlcompat.trainers.deepspeed.zero3_biases import ZeRO3BiasesMixin, _working  # noqa: E402 - part of the stack

FUNCTION = linear.LinearFunctionForZeroStage3


def trainer(stage: int | None, train: Any, *parameters: Any) -> Any:
    class Base:
        model = SimpleNamespace(parameters=lambda: parameters)
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

    def leaves() -> list[Any]:
        inputs, weight, bias = (tensor.clone().requires_grad_() for tensor in tensors)
        weight.requires_grad_(not frozen)
        return [inputs, weight, bias]

    def gradients(function: Any, given: list[Any]) -> list[Any]:
        function(*given).square().sum().backward()
        return [tensor.grad for tensor in given]

    right = gradients(torch.nn.functional.linear, leaves())
    given = leaves()
    found = trainer(3, lambda: gradients(FUNCTION.apply, given), *given[1:]).train()
    assert (found[1] is None) == frozen
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


class Context:
    """What DeepSpeed saves for the backward pass of a layer, and how an older release fails there."""

    def __init__(self, weight: Any, bias: Any) -> None:
        self.saved_tensors = (torch.ones(2, 3), weight, bias)


def failing(context: Any, gradient: Any) -> Any:
    if context.saved_tensors[2] is not None:
        raise UnboundLocalError("cannot access local variable 'dim' where it is not associated with a value")
    return "inputs", None, None


@pytest.mark.parametrize(("stage", "cured"), [(3, True), (2, False), (None, False)])
def test_layers_of_a_trainer_under_zero3_are_cured_and_no_others(
    stage: int | None, cured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[Any] = []  # whatever DeepSpeed is installed, as for one that needs it
    monkeypatch.setattr(zero3_biases, "expected", lambda point: True)
    monkeypatch.setattr(zero3_biases, "extended", lambda point, make, cure: changed.append((point.name, make)))
    weight, others, bias = torch.ones(4, 3), torch.ones(4, 3), torch.ones(4)
    trainer(stage, lambda: None, weight).train()
    assert changed == ([("backward", _working)] if cured else [])
    backward = _working(failing)
    gradient = torch.ones(2, 4)
    if cured:
        inputs, none, of_bias = backward(Context(weight, bias), gradient)
        assert (inputs, none, of_bias.tolist()) == ("inputs", None, [2.0] * 4)
    for one in [others] if cured else [weight, others]:
        with pytest.raises(UnboundLocalError, match="'dim'"):
            backward(Context(one, bias), gradient)


def test_other_errors_stay() -> None:
    def wrong(*_: Any) -> None:
        raise UnboundLocalError("cannot access local variable 'bias'")

    with pytest.raises(UnboundLocalError, match="'bias'"):
        _working(wrong)(Context(None, None), None)
