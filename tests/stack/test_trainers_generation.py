"""The cures of ``grpo-sampling`` and ``grpo-checkpointed-generation``: what they change, and put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from pytest_trlcompat.trainers.curing.cure import Activity  # noqa: E402 - needs torch
from pytest_trlcompat.trainers.generation.checkpointed_generation import (  # noqa: E402 - needs torch
    CheckpointedGenerationMixin,
    gradient_checkpointing_off,
)
from pytest_trlcompat.trainers.generation.sampling import (  # noqa: E402 - needs torch
    SamplingMixin,
    sampling_preferences_set_aside,
)

Module: Any = torch.nn.Module


class Model(Module):
    def __init__(self, **preferences: Any) -> None:
        super().__init__()
        self.generation_config = SimpleNamespace(eos_token_id=[1, 7], **preferences)
        self.layer = torch.nn.Linear(1, 1)
        self.other = torch.nn.Linear(1, 1)


WANTED = SimpleNamespace(temperature=1.0, top_k=0, top_p=1.0, eos_token_id=1)


def test_preferences_are_set_aside_and_put_back() -> None:
    model = Model(temperature=0.7, top_k=20, top_p=0.8, typical_p=0.5)
    original = model.generation_config
    with sampling_preferences_set_aside(model, WANTED):
        now = model.generation_config
        assert (now.temperature, now.top_k, now.top_p, now.typical_p) == (1.0, 0, 1.0, None)
        assert now.eos_token_id == [1, 7]  # no preference about sampling
        assert original.temperature == 0.7
    assert model.generation_config is original


def test_preferences_are_put_back_after_an_error() -> None:
    model = Model(temperature=0.7, top_k=20, top_p=0.8)
    original = model.generation_config
    with pytest.raises(KeyError), sampling_preferences_set_aside(model, WANTED):
        raise KeyError
    assert model.generation_config is original


def test_a_model_without_preferences_is_left_alone() -> None:
    model = Model(temperature=1.0, top_k=0, top_p=1.0)
    original = model.generation_config
    with sampling_preferences_set_aside(model, WANTED):
        assert model.generation_config is original


def test_an_adapter_s_base_model_is_meant() -> None:
    base = Model(temperature=0.7)
    adapter = Model(temperature=0.7)
    adapter.get_base_model = lambda: base
    with sampling_preferences_set_aside(adapter, WANTED):
        assert base.generation_config.temperature == 1.0
        assert adapter.generation_config.temperature == 0.7


class Upstream:
    def __init__(self, args: Any, top_k: Any) -> None:
        self.args = args
        self.generation_config = SimpleNamespace(top_k=top_k)


@pytest.mark.parametrize(
    ("args", "before", "after"),
    [
        ({}, 50, 0),  # trl 0.14 and 0.15 do not know the word
        ({"top_k": None}, None, 0),
        ({"top_k": 0}, 0, 0),
        ({"top_k": 50}, 50, 50),
        ({"top_k": 12}, 12, 12),
        ({"top_k": None, "generation_kwargs": {"top_k": 50}}, 50, 50),
        ({"top_k": None, "generation_kwargs": None}, None, 0),
    ],
)
def test_no_limit_means_no_limit(args: dict[str, Any], before: Any, after: int) -> None:
    corrected: Any = type("Corrected", (SamplingMixin, Upstream), {})
    assert corrected(SimpleNamespace(**args), before).generation_config.top_k == after


def test_checkpointing_is_off_and_then_as_it_was() -> None:
    model = Model()
    model.layer.gradient_checkpointing = True
    model.other.gradient_checkpointing = False
    with gradient_checkpointing_off(model):
        assert [model.layer.gradient_checkpointing, model.other.gradient_checkpointing] == [False, False]
    assert [model.layer.gradient_checkpointing, model.other.gradient_checkpointing] == [True, False]
    with pytest.raises(KeyError), gradient_checkpointing_off(model):
        raise KeyError
    assert [model.layer.gradient_checkpointing, model.other.gradient_checkpointing] == [True, False]


def checkpoints(model: Any) -> bool:
    return bool(model.layer.gradient_checkpointing)


@contextmanager
def unwrapping(model: Any, accelerator: Any) -> Iterator[Any]:
    """As TRL's, in releases that leave checkpointing on."""
    yield model


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a trainer that generates as TRL's does, by what the module has imported for itself."""
    module: Any = ModuleType("a_users_module")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Trainer:
        def __init__(self, meanwhile: Any = None) -> None:
            self.args = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs=None)
            self.accelerator, self.meanwhile, self.model = object(), meanwhile, Model()
            self.model.layer.gradient_checkpointing = True

        def _prepare_inputs(self, inputs: Any) -> list[bool]:
            with module.unwrap_model_for_generation(self.model, self.accelerator) as unwrapped:
                found = [checkpoints(unwrapped)]
            return found + (self.meanwhile() if self.meanwhile else [])

    Trainer.__module__ = module.__name__
    module.Trainer, module.unwrap_model_for_generation = Trainer, unwrapping
    return module


def test_a_trainer_that_imports_trls_function_for_itself_is_cured(users: Any) -> None:
    cured: Any = type("Cured", (CheckpointedGenerationMixin, users.Trainer), {})
    trainer = cured()
    assert trainer._prepare_inputs([]) == [False]
    assert checkpoints(trainer.model)
    assert CheckpointedGenerationMixin._activity(cured, None) == Activity(
        None, "with gradient checkpointing, without vLLM: TRL generates with checkpointing on"
    )


def test_a_function_that_two_modules_share_is_changed_once(users: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    @contextmanager
    def counted(model: Any) -> Iterator[None]:
        entered.append(model)
        yield

    monkeypatch.setattr(
        "pytest_trlcompat.trainers.generation.checkpointed_generation.gradient_checkpointing_off", counted
    )
    module: Any = import_module("trl.trainer.grpo_trainer")
    monkeypatch.setattr(module, "unwrap_model_for_generation", unwrapping)
    cured: Any = type("Cured", (CheckpointedGenerationMixin, users.Trainer), {})
    cured()._prepare_inputs([])
    users.unwrap_model_for_generation = module.unwrap_model_for_generation  # imported after it was changed
    trainer = cured()
    trainer._prepare_inputs([])
    assert (len(entered), entered[1]) == (2, trainer.model)


def test_a_trainer_that_a_reward_function_trains_generates_as_upstream_does(users: Any) -> None:
    cured: Any = type("Cured", (CheckpointedGenerationMixin, users.Trainer), {})
    inner = users.Trainer()

    nested = cured()
    assert cured(lambda: inner._prepare_inputs([]))._prepare_inputs([]) == [False, True]
    assert cured(lambda: nested._prepare_inputs([]))._prepare_inputs([]) == [False, False]
