"""The cures of ``grpo-train-sampler``, ``grpo-lora-checkpointing`` and ``deepspeed-empty-param-group``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import tiny
from pytest_trlcompat.trainers.empty_param_groups import EmptyParamGroupsMixin
from pytest_trlcompat.trainers.lora_checkpointing import (
    LoraCheckpointingMixin,
    _keeping_keywords,
    checkpointing_keywords,
    input_gradients_are_on,
    trains_adapters,
)
from pytest_trlcompat.trainers.train_sampler import TrainSamplerMixin


class TakesNone:
    def _get_train_sampler(self) -> str:
        return "own"


class TakesOne:
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return dataset


@pytest.mark.parametrize(("base", "bare", "given"), [(TakesNone, "own", "own"), (TakesOne, None, "data")])
def test_the_sampler_is_asked_as_it_wants_to_be(base: type, bare: Any, given: Any) -> None:
    mine: Any = type("Mine", (TrainSamplerMixin, base), {})()
    assert mine._get_train_sampler() == bare
    assert mine._get_train_sampler("data") == given


def lora() -> Any:
    peft = pytest.importorskip("peft")
    policy = tiny.qwen2().model
    return peft.get_peft_model(policy, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def trainer_of(model: Any, kwargs: Any, checkpointing: bool = True) -> Any:
    class Base:
        def __init__(self) -> None:
            self.model = model
            self.args = SimpleNamespace(gradient_checkpointing=checkpointing, gradient_checkpointing_kwargs=kwargs)

    class Mine(LoraCheckpointingMixin, Base):
        pass

    return Mine()


@pytest.mark.parametrize("kwargs", [None, {}, {"use_reentrant": True}])
def test_inputs_of_adapters_require_gradients_under_reentrant_checkpointing(kwargs: Any) -> None:
    model = lora()
    assert trains_adapters(model)
    assert not input_gradients_are_on(model)
    trainer_of(model, kwargs)
    assert input_gradients_are_on(model)
    hooks = len(model.get_input_embeddings()._forward_hooks)
    trainer_of(model, kwargs)  # and once is enough
    assert len(model.get_input_embeddings()._forward_hooks) == hooks


def test_nothing_is_changed_where_nothing_is_wrong() -> None:
    model = lora()
    trainer_of(model, {"use_reentrant": False})
    trainer_of(model, None, checkpointing=False)
    assert not input_gradients_are_on(model)
    whole = tiny.qwen2().model
    assert not trains_adapters(whole)
    trainer_of(whole, None)
    assert not input_gradients_are_on(whole)


def test_checkpointing_keeps_its_keywords_through_generation() -> None:
    model = lora()
    assert checkpointing_keywords(model) is None
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    @contextmanager
    def unwrap(model: Any) -> Iterator[Any]:  # as trl 0.22 to 0.25 do
        model.gradient_checkpointing_disable()
        yield model
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})

    with unwrap(model):
        assert checkpointing_keywords(model) is None
    assert checkpointing_keywords(model) == {"use_reentrant": True}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with _keeping_keywords(unwrap)(model) as unwrapped:
        assert unwrapped is model
        assert checkpointing_keywords(model) is None
    assert checkpointing_keywords(model) == {"use_reentrant": False}


@pytest.mark.parametrize(("enabled", "left"), [(True, [["weight"]]), (False, [["weight"], []])])
def test_an_empty_group_is_dropped_under_deepspeed_alone(enabled: bool, left: list[list[str]]) -> None:
    class Base:
        is_deepspeed_enabled = enabled
        optimizer: Any = None

        def create_optimizer(self, *models: Any) -> Any:
            self.optimizer = SimpleNamespace(param_groups=[{"params": ["weight"]}, {"params": []}])
            return self.optimizer

    class Mine(EmptyParamGroupsMixin, Base):
        pass

    created = Mine().create_optimizer("model")
    assert [group["params"] for group in created.param_groups] == left
