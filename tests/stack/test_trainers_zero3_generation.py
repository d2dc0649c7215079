"""The cure of ``grpo-zero3-optimizer``: whose engine it finds, and that hooks come back even when generation fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import tiny
from pytest_trlcompat.launch import Launcher

pytest.importorskip("trl")


def accelerator(engine: Any, stage: int = 3) -> Any:
    wrapper = None if engine is None else SimpleNamespace(engine=engine)
    return SimpleNamespace(
        deepspeed_engine_wrapped=wrapper, state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    )


def test_the_engine_of_a_bare_module_is_found() -> None:
    from pytest_trlcompat.trainers.deepspeed.zero3_generation import engine_of

    module, other = SimpleNamespace(), SimpleNamespace()
    engine = SimpleNamespace(module=module, optimizer=None)
    assert engine_of(module, accelerator(engine)) is engine
    assert engine_of(engine, accelerator(None)) is engine
    assert engine_of(other, accelerator(engine)) is other  # a reference model has an engine of its own
    assert engine_of(module, accelerator(None)) is module
    assert engine_of(module, SimpleNamespace()) is module


@pytest.mark.parametrize(
    ("arguments", "keywords", "handed_on"),
    [
        ({"ds3_gather_for_generation": False}, {}, {"gather_deepspeed3_params": False}),
        ({"ds3_gather_for_generation": True}, {}, {"gather_deepspeed3_params": True}),
        ({"ds3_gather_for_generation": False}, {"gather_deepspeed3_params": True}, {"gather_deepspeed3_params": True}),
        ({}, {}, {}),
    ],
    ids=["no", "yes", "trl says it", "0.14"],
)
def test_what_the_user_said_about_gathering_is_handed_on(
    arguments: dict[str, bool], keywords: dict[str, bool], handed_on: dict[str, bool]
) -> None:
    from pytest_trlcompat.trainers.deepspeed.zero3_generation import _gathering_as_asked

    unwrap = _gathering_as_asked(SimpleNamespace(**arguments))(lambda model, accelerator, **given: given)
    assert unwrap("model", "accelerator", **keywords) == handed_on


def test_other_stages_are_left_to_trl() -> None:
    from contextlib import nullcontext

    from pytest_trlcompat.trainers.deepspeed.zero3_generation import _right_for_bare_modules

    module = SimpleNamespace()
    engine = SimpleNamespace(module=module, optimizer=None)
    received: list[Any] = []

    def upstream(model: Any, accelerator: Any, **_: Any) -> Any:
        received.append(model)
        return nullcontext(model)

    for stage in (2, 3):
        with _right_for_bare_modules(upstream)(module, accelerator(engine, stage)):
            pass
    assert received == [module, engine]


def fail_in_generation(model: tiny.TinyModel) -> dict[str, Any]:
    """Hooks before a failing generation, during it and after, on a bare module with a mixin of its own."""
    import tempfile

    import trl
    from transformers import AutoModelForCausalLM

    from pytest_trlcompat.trainers.deepspeed import zero3_generation

    hooks: dict[str, int] = {}

    def live(module: Any) -> int:
        return sum(
            "deepspeed" in hook.__module__ for one in module.modules() for hook in one._forward_pre_hooks.values()
        )

    class Mine(zero3_generation.ZeRO3GenerationMixin, trl.GRPOTrainer):
        pass

    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        report_to="none",
        max_steps=1,
        save_strategy="no",
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        bf16=False,
    )
    trainer = Mine(
        model=AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager"),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=args,
        train_dataset=tiny.prompts(8, words=3),
        processing_class=model.tokenizer,
    )
    trainer.train()
    hooks["before"] = live(trainer.model)
    try:
        with zero3_generation.unwrap_model_for_generation(trainer.model, trainer.accelerator) as unwrapped:
            hooks["during"] = live(unwrapped)
            raise MemoryError("in generation")
    except MemoryError as error:
        hooks["after"] = live(trainer.model)
        return {**hooks, "error": str(error)}
    raise AssertionError("the error was swallowed")


def test_hooks_come_back_when_generation_fails(tmp_path: Any) -> None:
    with Launcher(device="software") as launch:
        model = tiny.qwen2(directory=tmp_path)
        launch(save, model, strategy="single")
        found = launch(fail_in_generation, model, strategy="zero3").values[0]
    assert found["error"] == "in generation"
    assert found["before"] > 50
    assert found["during"] <= 2
    assert found["after"] == found["before"]


def save(model: tiny.TinyModel) -> str:
    return str(model.path)
