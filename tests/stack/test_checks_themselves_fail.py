"""What the checks cannot look at, and checks that fail themselves: no training ends by them, and no rank waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher

from .checks_bodies import build, watch
from .healthy_bodies import arguments, language_model, rows

pytest.importorskip("trl")


def without_storage(folder: str) -> Any:
    """A model with a frozen part, here unused, whose weight is made of other tensors, as torchao's quantised ones are.

    It is torch's own kind, of two equal tensors, since no cell has torchao; it refuses what torchao's refuse.
    """
    import torch
    import transformers
    from torch.testing._internal.two_tensor import TwoTensor

    class Quantised(TwoTensor):
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            if function is torch.ops.aten.view.dtype:
                raise NotImplementedError("aten.view.dtype")
            result = super().__torch_dispatch__(function, types, args, kwargs)
            return cls(result.a, result.b) if type(result) is TwoTensor else result

    model = language_model("dense")
    model.tower = torch.nn.Linear(8, 8, bias=False)
    weight = model.tower.weight.detach()
    model.tower.weight = torch.nn.Parameter(Quantised(weight, weight.clone()), requires_grad=False)
    args = arguments(transformers.TrainingArguments, folder, {"save_strategy": "no"})
    return watch(transformers.Trainer(model=model, args=args, train_dataset=rows()))


def test_tensors_without_a_storage_are_left_out_and_named(launcher: Launcher, tmp_path: Path) -> None:
    (rank,) = launcher(without_storage, str(tmp_path), strategy="single").values
    assert rank["said"] == []
    assert rank["found"]["moved"] == {"moved": 27, "frozen": 1, "skipped": ["tower.weight"]}


class Plain:
    """Gradient descent of one's own, which is no ``torch.optim.Optimizer``."""

    def __init__(self, parameters: Any, rate: float, stands: bool) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": rate, "initial_lr": rate}]
        self.state: dict[Any, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.stands = stands

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and not self.stands:
                parameter.data.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {}


class Constant:
    """Its schedule."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def step(self, *_: Any) -> None:
        pass

    def get_last_lr(self) -> list[float]:
        return [self.rate]

    def state_dict(self) -> dict[str, Any]:
        return {}


def own_optimizer(folder: str, stands: bool) -> Any:
    import transformers

    model = language_model("dense")
    optimizer: Any = Plain(model.parameters(), 1e-2, stands)
    args = arguments(transformers.TrainingArguments, folder, {"save_strategy": "no", "max_steps": 9})
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=rows(),
        optimizers=(optimizer, Constant(1e-2)),
    )
    said = watch(trainer, on_failure="warn")
    return {**said, "unhooked": "step" not in vars(optimizer)}


@pytest.mark.parametrize("stands", [False, True])
def test_an_optimizer_that_is_none_of_torchs_is_heard(launcher: Launcher, stands: bool, tmp_path: Path) -> None:
    (rank,) = launcher(own_optimizer, str(tmp_path), stands, strategy="single").values
    assert rank["unhooked"]
    assert [each[0] for each in rank["said"]] == (["moved", "moved"] if stands else [])
    assert [each[2] for each in rank["said"]] == (["error", "error"] if stands else [])
    assert {"gradients", "steps"} <= {check for check, _ in rank["checked"]}


PLACES = {
    "WeightsBefore": ("first_steps", "logits, forward, gradients, moved, data, steps", 0),
    "read_gradients": ("first_steps", "forward, gradients, moved, data, steps", 0),
    "check_moved": ("first_steps", "forward, moved, data, steps", 1),
    "scheduler_steps": ("later", "ranks, schedule", 0),
}
"""What fails on one rank, in which module, with the checks that cannot be done for it, and the step."""


def fails_on_rank_1(folder: str, name: str, module: str) -> Any:
    import importlib

    trainer = build(folder, max_steps=5, save_strategy="no", lora={"target_modules": ["q_proj"]})

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("lost")

    if trainer.accelerator.process_index == 1:
        setattr(importlib.import_module(f"pytest_trlcompat.checks.{module}"), name, fail)
    said = watch(trainer)
    return {**said, "hooked": "compute_loss" in vars(trainer)}


@pytest.mark.parametrize("name", PLACES)
def test_what_fails_on_one_rank_is_left_by_all_and_ends_no_training(
    launcher: Launcher, name: str, tmp_path: Path
) -> None:
    module, checks, step = PLACES[name]
    for rank in launcher(fails_on_rank_1, str(tmp_path), name, module, strategy="ddp", sharded=False).values:
        ((checked, at, kind, text),) = rank["said"]
        assert (checked, at, kind) == (checks, step, "odd")
        what = "the first steps" if module == "first_steps" else "the training as it goes on"
        assert text == f"rank 1 of 2: {what} could not be checked: KeyError: 'lost'"
        assert [entry["step"] for entry in rank["log"] if "loss" in entry] == [1, 2, 3, 4, 5]
        assert not rank["hooked"]
