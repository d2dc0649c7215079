"""The cure of ``deepspeed-evaluate-before-train``: what is left behind, and what is put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.trainers.deepspeed.deepspeed_evaluation import DeepSpeedEvaluationMixin, remove_deepspeed_hooks


class Base:
    """What the cure touches of a ``transformers.Trainer``."""

    def __init__(self, enabled: bool = True) -> None:
        self.is_deepspeed_enabled = enabled
        self.model = SimpleNamespace(modules=list)
        self.model_wrapped: Any = self.model
        self.deepspeed: Any = None
        self.freed = 0
        config = SimpleNamespace(config={"optimizer": {"lr": "auto"}})
        plugin = SimpleNamespace(hf_ds_config=config)
        self.accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin), free_memory=self.free)

    def free(self) -> None:
        self.freed += 1

    def evaluation_loop(self) -> str:
        if self.is_deepspeed_enabled:
            del self.accelerator.state.deepspeed_plugin.hf_ds_config.config["optimizer"]
            self.deepspeed = self.model_wrapped = SimpleNamespace()
        return "evaluated"

    def train(self) -> tuple[Any, Any, Any]:
        config = self.accelerator.state.deepspeed_plugin.hf_ds_config.config
        return self.deepspeed, self.model_wrapped, dict(config)


class Mine(DeepSpeedEvaluationMixin, Base):
    pass


def test_training_starts_as_if_there_had_been_no_evaluation() -> None:
    trainer = Mine()
    assert trainer.evaluation_loop() == "evaluated"
    assert trainer.train() == (None, trainer.model, {"optimizer": {"lr": "auto"}})
    assert trainer.freed == 1


def test_nothing_is_touched_without_an_engine_or_without_deepspeed() -> None:
    fresh, other = Mine(), Mine(enabled=False)
    assert fresh.train() == (None, fresh.model, {"optimizer": {"lr": "auto"}})
    other.evaluation_loop()
    other.deepspeed = "kept"
    assert other.train()[0] == "kept"
    assert fresh.freed == other.freed == 0


def test_only_deepspeeds_hooks_are_removed() -> None:
    torch = pytest.importorskip("torch")

    def theirs(module: Any, inputs: Any) -> None: ...

    theirs.__module__ = "deepspeed.utils.nvtx"
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    for one in module.modules():
        one.register_forward_pre_hook(theirs)
        one.register_forward_hook(lambda *_: None)
    assert remove_deepspeed_hooks(module) == 2
    assert remove_deepspeed_hooks(module) == 0
    assert [len(one._forward_hooks) for one in module.modules()] == [1, 1]
