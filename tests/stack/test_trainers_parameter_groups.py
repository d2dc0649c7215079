"""The cure for optimizer groups without parameters: gone before a scheduler is made for them, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat.trainers.parameter_groups import NoEmptyParameterGroupsMixin, drop_empty_parameter_groups

torch = pytest.importorskip("torch")


def adam(*counts: int) -> Any:
    """An optimizer with a group of so many parameters each."""
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2)) for _ in range(count)], "weight_decay": float(index)}
        for index, count in enumerate(counts)
    ]
    return torch.optim.AdamW(groups, lr=0.1)


class Trainer:
    """As ``transformers.Trainer`` does: keeps an optimizer that was passed, else makes one."""

    def __init__(self, passed: Any = None) -> None:
        self.optimizer = passed

    def create_optimizer(self) -> Any:
        if self.optimizer is None:
            self.optimizer = adam(2, 0, 1)
        return self.optimizer


class Cured(NoEmptyParameterGroupsMixin, Trainer):
    pass


def test_groups_with_parameters_stay_as_they_are() -> None:
    optimizer = adam(2, 1)
    before = [dict(group) for group in optimizer.param_groups]
    drop_empty_parameter_groups(optimizer)
    assert optimizer.param_groups == before


def test_a_scheduler_that_is_made_afterwards_steps_when_deepspeed_takes_empty_groups_out() -> None:
    trainer = Cured()
    optimizer = trainer.create_optimizer()
    assert trainer.optimizer is optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 2.0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]  # DeepSpeed's engine
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.05, 0.05]


def test_an_optimizer_that_was_passed_is_left_alone() -> None:
    passed = adam(1, 0)
    assert Cured(passed).create_optimizer() is passed
    assert len(passed.param_groups) == 2
