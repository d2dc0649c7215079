"""The small cures: of samplers, adapters' checkpointing, empty groups of parameters, resuming, a missing kernel."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import tiny
from pytest_trlcompat.trainers.adapters.adapter_checkpointing import (
    AdapterCheckpointingMixin,
    checkpointing_keywords,
    input_gradients_are_on,
)
from pytest_trlcompat.trainers.adapters.lora_checkpointing import _keeping_keywords
from pytest_trlcompat.trainers.checkpoints.resuming import ResumingMixin, random_states_can_be_loaded
from pytest_trlcompat.trainers.curing.conditions import trains_adapters
from pytest_trlcompat.trainers.deepspeed import zero3_lora_checkpointing
from pytest_trlcompat.trainers.deepspeed.empty_param_groups import EmptyParamGroupsMixin
from pytest_trlcompat.trainers.deepspeed.zero3_lora_checkpointing import ZeRO3LoraCheckpointingMixin
from pytest_trlcompat.trainers.logprobs import plain_logprobs
from pytest_trlcompat.trainers.logs.log_start_time import LogStartTimeMixin
from pytest_trlcompat.trainers.setup.train_sampler import TrainSamplerMixin
from pytest_trlcompat.trainers.setup.warnings_issued import WarningsIssuedMixin


class TakesNone:
    def _get_train_sampler(self) -> str:
        return "own"


class TakesOne:
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return dataset


@pytest.mark.parametrize(("base", "without", "with_dataset"), [(TakesNone, "own", "own"), (TakesOne, None, "data")])
def test_the_sampler_method_gets_the_arguments_that_it_takes(base: type, without: Any, with_dataset: Any) -> None:
    mine: Any = type("Mine", (TrainSamplerMixin, base), {})()
    assert mine._get_train_sampler() == without
    assert mine._get_train_sampler("data") == with_dataset


class LogsAlone:
    def log(self, logs: dict[str, float]) -> None:
        self.logged = (logs,)


class LogsWithTime:
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.logged = (logs, start_time)


@pytest.mark.parametrize(("base", "more"), [(LogsAlone, ()), (LogsWithTime, (2.0,))])
def test_the_log_method_gets_the_arguments_that_it_takes(base: type, more: tuple[float, ...]) -> None:
    mine: Any = type("Mine", (LogStartTimeMixin, base), {})()
    mine.log({"loss": 1.0}, 2.0)
    assert mine.logged == ({"loss": 1.0}, *more)
    mine.log({"loss": 1.0}, start_time=2.0)
    assert mine.logged == ({"loss": 1.0}, *more)
    mine.log({"loss": 1.0})
    assert mine.logged[0] == {"loss": 1.0}


def lora() -> Any:
    peft = pytest.importorskip("peft")
    policy = tiny.qwen2().model
    return peft.get_peft_model(policy, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def wrapped_for_training(model: Any, kwargs: Any, checkpointing: bool = True, training: bool = True) -> None:
    class Base:
        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            assert training or dataloader == "of an evaluation"
            return model

    class Mine(AdapterCheckpointingMixin, Base):
        pass

    if checkpointing and checkpointing_keywords(model) is None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        model.get_input_embeddings()._forward_hooks.clear()  # Transformers 5 asks for gradients itself
    mine: Any = Mine.__new__(Mine)
    assert (
        mine._wrap_model(model, **({} if training else {"training": False, "dataloader": "of an evaluation"})) is model
    )


def test_inputs_of_adapters_require_gradients_under_reentrant_checkpointing() -> None:
    model = lora()
    assert trains_adapters(model)
    wrapped_for_training(model, {"use_reentrant": True}, training=False)
    assert not input_gradients_are_on(model)
    wrapped_for_training(model, {"use_reentrant": True})
    assert input_gradients_are_on(model)
    hooks = len(model.get_input_embeddings()._forward_hooks)
    wrapped_for_training(model, {"use_reentrant": True})  # and once is enough
    assert len(model.get_input_embeddings()._forward_hooks) == hooks


def test_nothing_is_changed_where_nothing_is_wrong() -> None:
    model = lora()
    wrapped_for_training(model, {"use_reentrant": False})
    assert not input_gradients_are_on(model)
    wrapped_for_training(lora_model := lora(), None, checkpointing=False)
    assert not input_gradients_are_on(lora_model)
    whole = tiny.qwen2().model
    assert not trains_adapters(whole)
    wrapped_for_training(whole, {"use_reentrant": True})
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
        accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=object() if enabled else None))
        optimizer: Any = None

        def create_optimizer(self, *models: Any) -> Any:
            self.optimizer = SimpleNamespace(param_groups=[{"params": ["weight"]}, {"params": []}])
            return self.optimizer

    class Mine(EmptyParamGroupsMixin, Base):
        pass

    created = Mine().create_optimizer("model")
    assert [group["params"] for group in created.param_groups] == left


def trainer_under(stage: int | None, model: Any, kwargs: Any, checkpointing: bool = True) -> Any:
    class Base:
        accelerator = SimpleNamespace(
            state=SimpleNamespace(deepspeed_plugin=None if stage is None else SimpleNamespace(zero_stage=stage))
        )

        def __init__(self) -> None:
            self.model = model
            self.args = SimpleNamespace(gradient_checkpointing=checkpointing, gradient_checkpointing_kwargs=kwargs)

    class Mine(ZeRO3LoraCheckpointingMixin, Base):
        pass

    return Mine()


@pytest.mark.parametrize("kwargs", [None, {}, {"use_reentrant": False}, {"use_reentrant": False, "debug": False}])
def test_checkpointing_of_adapters_is_reentrant_under_zero3(
    kwargs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zero3_lora_checkpointing, "_frozen_parameters_stay_whole", lambda: False)
    model = lora()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer = trainer_under(3, model, kwargs)
    assert trainer.args.gradient_checkpointing_kwargs == {**(kwargs or {}), "use_reentrant": True}
    assert checkpointing_keywords(model) == trainer.args.gradient_checkpointing_kwargs
    assert input_gradients_are_on(model)
    asked_otherwise = bool(kwargs) and kwargs["use_reentrant"] is False
    assert ("use_reentrant=False, with which adapters cannot be trained" in caplog.text) == asked_otherwise


def test_checkpointing_is_left_alone_where_deepspeed_leaves_frozen_parameters_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = pytest.importorskip("deepspeed.runtime.zero.partitioned_param_coordinator")
    adapters = lora()
    monkeypatch.setattr(coordinator, "update_recompute_parameters", object(), raising=False)
    assert trainer_under(3, adapters, None).args.gradient_checkpointing_kwargs is None
    monkeypatch.delattr(coordinator, "update_recompute_parameters")
    assert trainer_under(3, adapters, None).args.gradient_checkpointing_kwargs == {"use_reentrant": True}


def test_checkpointing_is_left_alone_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero3_lora_checkpointing, "_frozen_parameters_stay_whole", lambda: False)
    whole, adapters = tiny.qwen2().model, lora()
    for stage, model, kwargs, checkpointing in (
        (None, adapters, None, True),
        (2, adapters, {"use_reentrant": False}, True),
        (3, whole, {"use_reentrant": False}, True),
        (3, adapters, {"use_reentrant": True}, True),
        (3, adapters, None, False),
    ):
        trainer = trainer_under(stage, model, kwargs, checkpointing)
        assert trainer.args.gradient_checkpointing_kwargs == kwargs
        assert not input_gradients_are_on(model)


def test_numpys_random_state_can_be_loaded_where_transformers_does_not_see_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    import numpy as np
    import torch
    import transformers.trainer

    file = tmp_path / "rng_state.pth"
    torch.save({"numpy": np.random.RandomState(5).get_state()}, file)

    class Base:
        def _load_rng_state(self, checkpoint: Any) -> Any:
            self.loaded = torch.load(checkpoint, weights_only=True)

    class Mine(ResumingMixin, Base):
        pass

    mine: Any = Mine()
    monkeypatch.setattr(transformers.trainer, "safe_globals", None, raising=False)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        mine._load_rng_state(file)
    monkeypatch.delattr(transformers.trainer, "safe_globals")
    mine._load_rng_state(file)
    assert mine.loaded["numpy"][1].tolist() == np.random.RandomState(5).get_state()[1].tolist()
    with pytest.raises(pickle.UnpicklingError):  # and nothing stays allowed
        torch.load(file, weights_only=True)
    with random_states_can_be_loaded():
        assert torch.load(file, weights_only=True)["numpy"][0] == "MT19937"


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("biased", [True, False])
def test_log_probabilities_without_triton_are_those_of_whole_logits(softcap: float | None, biased: bool) -> None:
    import torch

    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(6, 4), torch.randn(9, 4), torch.randn(9) if biased else None
    targets = torch.tensor([0, 8, 3, 3, 5, 1])
    function = plain_logprobs._function(SimpleNamespace(maybe_gather_lm_head_ctx=lambda *_: nullcontext()))

    def gradients(compute: Any) -> tuple[list[Any], list[Any]]:
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
        results = compute(leaves[0], leaves[1], leaves[2] if biased else None)
        (results[0].square().sum() + (results[1] * torch.arange(6)).sum()).backward()
        return [result.detach() for result in results], [leaf.grad for leaf in leaves]

    def truth(hidden: Any, weight: Any, bias: Any) -> list[Any]:
        logits = (hidden @ weight.T + (0 if bias is None else bias)) * 2.0
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / 0.7
        probabilities = logits.softmax(-1)
        logps = logits.log_softmax(-1)
        chosen = logps[torch.arange(6), targets]
        entropy = -(probabilities * logps).sum(-1)
        return [chosen, entropy, probabilities.square().sum(-1).log(), logits.mean(-1), logits.argmax(-1) == targets]

    found = gradients(lambda *leaves: function.apply(*leaves, targets, 0.7, 4, softcap, 2.0))
    for ours, right in zip(found, gradients(truth), strict=True):
        assert all(torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in zip(ours, right, strict=True))
    some = function.apply(hidden, weight, bias, targets, 0.7, 4, softcap, 2.0, ("entropy",))
    assert [value is None for value in some] == [False, False, True, True, True]


def test_a_kernel_that_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    kernel = object()
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", kernel, raising=False)
    with plain_logprobs.log_probs_without_triton():
        assert utils._ChunkedLogProbFunction is kernel
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", None)
    with plain_logprobs.log_probs_without_triton():
        assert hasattr(utils._ChunkedLogProbFunction, "apply")
        with ThreadPoolExecutor(1) as other, pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
            other.submit(lambda: utils._ChunkedLogProbFunction.apply).result()
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'apply'"):
        utils._ChunkedLogProbFunction.apply  # noqa: B018 - as where nothing was ever put there
    with plain_logprobs.log_probs_without_triton():
        assert hasattr(utils._ChunkedLogProbFunction, "apply")
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with plain_logprobs.log_probs_without_triton():
        assert not hasattr(utils, "_ChunkedLogProbFunction")


def test_the_dictionary_of_warnings_is_lent_to_the_models_of_one_trainer() -> None:
    model = tiny.qwen2(num_hidden_layers=1).new_model()
    vars(model).pop("warnings_issued", None)  # Transformers before 5 gives each model one of its own
    seen = []

    def asked() -> dict[str, bool] | None:
        return getattr(model, "warnings_issued", None)

    class Upstream:
        def __init__(self) -> None:
            model.warnings_issued["estimate_tokens"] = True
            with ThreadPoolExecutor(1) as other:
                seen.extend([asked(), other.submit(asked).result()])

    class Mine(WarningsIssuedMixin, Upstream):
        pass

    for _ in range(2):
        Mine()
        assert [*seen, asked()] == [{"estimate_tokens": True}, None, None]
        seen.clear()
    with pytest.raises(AttributeError, match="object has no attribute 'warnings_issued'"):
        model.warnings_issued  # noqa: B018
    model.warnings_issued = {"mine": True}
    Mine()
    assert seen[0] == {"mine": True, "estimate_tokens": True}
