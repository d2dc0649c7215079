"""The cure of ``lora-zero3-whole-modules``: what PEFT's wrapper has of DeepSpeed while the context lasts."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import tiny

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")

from pytest_trlcompat.trainers.deepspeed import zero3_whole_modules  # noqa: E402 - of the stack
from pytest_trlcompat.trainers.deepspeed.zero3_whole_modules import ZeRO3WholeModulesMixin, own_hooks  # noqa: E402 - of the stack


@pytest.fixture
def wrapper() -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny.qwen2().new_model(), config).base_model.model.lm_head


@pytest.mark.parametrize("name", ["applied_pre_backward_ref_cnt", "ds_grads_remaining", "post_bwd_fn", "pre_bwd_fn"])
def test_a_wrapper_has_of_deepspeed_only_its_own(wrapper: Any, name: str) -> None:
    setattr(wrapper.modules_to_save["default"], name, 5)
    assert getattr(wrapper, name) == 5  # as PEFT has it
    with own_hooks():
        assert not hasattr(wrapper, name)
        setattr(wrapper, name, 0)
        assert (getattr(wrapper, name), getattr(wrapper.modules_to_save["default"], name)) == (0, 5)
    assert getattr(wrapper, name) == 0


def test_it_has_everything_else_of_the_module_in_use(wrapper: Any) -> None:
    with own_hooks():
        assert wrapper.weight is wrapper.modules_to_save["default"].weight
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = wrapper.nothing


def accelerator_of(stage: int | None) -> Any:
    plugin = None if stage is None else SimpleNamespace(zero_stage=stage)
    return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_pefts_class_is_changed_under_zero3_alone(monkeypatch: pytest.MonkeyPatch, stage: int | None) -> None:
    changed: list[str] = []
    monkeypatch.setattr(zero3_whole_modules, "extended", lambda point, make, cure: changed.append(point.name))

    class Base:
        model = torch.nn.Linear(1, 1)
        accelerator = accelerator_of(stage)

        def __init__(self, args: Any) -> None:
            pass

        def train(self) -> None:
            pass

        evaluate = train

    class Mine(ZeRO3WholeModulesMixin, Base):
        pass

    mine = Mine(Base.accelerator.state)
    built = list(changed)
    mine.train()
    trained = list(changed)
    mine.evaluate()
    # Both points each time: which of them there is, the table knows.
    assert (built, trained, changed) == (tuple(["__getattr__"] * n for n in (2, 4, 6)) if stage == 3 else ([], [], []))


def test_somebody_elses_adapter_is_compiled_as_one_graph(wrapper: Any) -> None:
    with own_hooks():  # PEFT's class is changed for good by now
        pass
    hidden = torch.ones(1, 2, wrapper.modules_to_save["default"].in_features)
    compiled = torch.compile(lambda value: wrapper(value) + wrapper.weight.sum(), fullgraph=True, backend="eager")
    assert torch.equal(compiled(hidden), wrapper(hidden) + wrapper.weight.sum())


def test_it_lasts_for_a_trainers_construction_and_for_its_own_model(wrapper: Any) -> None:
    wrapper.modules_to_save["default"].post_bwd_fn = 5
    other = copy.deepcopy(wrapper)
    found: list[bool] = []

    class Base:
        model = torch.nn.Sequential(wrapper)
        accelerator = accelerator_of(3)

        def __init__(self, args: Any) -> None:
            found.append(hasattr(other, "post_bwd_fn"))  # in construction, for all: its model may be made there

        def train(self) -> None:
            thread = threading.Thread(target=look)  # as backward passes on an accelerator run
            thread.start()
            thread.join()

        evaluate = train

    def look() -> None:
        found.extend((hasattr(wrapper, "post_bwd_fn"), hasattr(other, "post_bwd_fn")))

    class Mine(ZeRO3WholeModulesMixin, Base):
        pass

    assert hasattr(wrapper, "post_bwd_fn")
    mine = Mine(args=SimpleNamespace(deepspeed_plugin=accelerator_of(3).state.deepspeed_plugin))
    assert hasattr(wrapper, "post_bwd_fn")
    mine.train()
    mine.evaluate()
    assert found == [False, *[False, True] * 2]
    assert (hasattr(wrapper, "post_bwd_fn"), hasattr(other, "post_bwd_fn")) == (False, True)
