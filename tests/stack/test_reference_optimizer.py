"""The reference's optimizer: by hand, and against PyTorch's and Transformers' own."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from pytest_trlcompat import reference


def numbers(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}


def test_gradients_are_clipped_together() -> None:
    gradients = numbers(a=3.0, b=4.0)
    assert float(reference.gradient_norm(gradients)) == 5.0
    clipped = reference.clip_gradients(gradients, 1.0)
    assert [float(each) for each in clipped.values()] == pytest.approx([0.6, 0.8], rel=1e-6)
    assert clipped["a"].item() < 0.6  # the norm that is divided by has 1e-6 more
    for norm in (10.0, 0.0, None):
        assert {name: float(each) for name, each in reference.clip_gradients(gradients, norm).items()} == {
            "a": 3.0,
            "b": 4.0,
        }


def test_gradient_descent() -> None:
    # 1 - 0.1 * 2; 1 - 0.1 * (2 + 0.5 * 1) with decay
    after = reference.sgd_step(
        numbers(a=1.0, b=1.0), numbers(a=2.0, b=2.0), lr=0.1, weight_decay=0.5, decayed=frozenset({"b"})
    )
    assert {name: float(each) for name, each in after.items()} == pytest.approx({"a": 0.8, "b": 0.75})


def test_the_first_step_of_adamw_is_the_learning_rate() -> None:
    # The first unbiased moments are g and g^2: a step of lr * g / (|g| + eps), 0.1 * 2 / (2 + 0.5); with decay, 1 is
    # first multiplied by 1 - 0.1 * 0.5.
    after, state = reference.adamw_step(
        numbers(a=1.0, b=1.0),
        numbers(a=2.0, b=-2.0),
        reference.AdamWState(),
        lr=0.1,
        eps=0.5,
        weight_decay=0.5,
        decayed=frozenset({"b"}),
    )
    assert {name: float(each) for name, each in after.items()} == pytest.approx({"a": 1 - 0.08, "b": 0.95 + 0.08})
    assert state.steps == 1
    assert float(state.first["a"]) == pytest.approx(0.2)
    assert float(state.second["a"]) == pytest.approx(0.004)


def test_adamw_goes_on_as_pytorchs_does() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(3, 2, dtype=torch.float64, generator=generator) for name in ("a", "b")}
    parameters = {name: torch.nn.Parameter(each.clone()) for name, each in weights.items()}
    theirs = torch.optim.AdamW(
        [{"params": [parameters["a"]], "weight_decay": 0.3}, {"params": [parameters["b"]], "weight_decay": 0.0}],
        lr=0.05,
        betas=(0.7, 0.9),
        eps=1e-3,
    )
    state = reference.AdamWState()
    for _ in range(5):
        gradients = {name: torch.randn(3, 2, dtype=torch.float64, generator=generator) for name in weights}
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        theirs.step()
        weights, state = reference.adamw_step(
            weights,
            gradients,
            state,
            lr=0.05,
            betas=(0.7, 0.9),
            eps=1e-3,
            weight_decay=0.3,
            decayed=frozenset({"a"}),
        )
    for name, parameter in parameters.items():
        assert torch.allclose(weights[name], parameter, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("constant_with_warmup", [0, 0.5, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0, 0.5, 1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 - math.cos(math.pi / 4)) / 2]),
    ],
)
def test_the_learning_rate_of_each_step(kind: str, expected: list[float]) -> None:
    found = [reference.learning_rate_factor(kind, step, total=6, warmup=2) for step in range(6)]
    assert found == pytest.approx(expected)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = transformers.get_scheduler(kind, optimizer, num_warmup_steps=2, num_training_steps=6)
    rates = []
    for _ in range(6):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert found == pytest.approx(rates)


def test_other_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="lr_scheduler_type='polynomial' is not part of the reference"):
        reference.learning_rate_factor("polynomial", 0, total=1)


def test_biases_and_norms_do_not_decay() -> None:
    class RMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

    model = torch.nn.ModuleDict(
        {"inner": torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2), "last": RMSNorm()}), "n": torch.nn.LayerNorm(2)}
    )
    assert reference.decayed_parameters(model) == {"inner.linear.weight"}


def test_the_reference_model_moves_towards_the_policy() -> None:
    mixed = reference.mix_weights(numbers(a=1.0), numbers(a=3.0), 0.25)
    assert float(mixed["a"]) == pytest.approx(0.25 * 1 + 0.75 * 3)
