"""The cure of ``grpo-adapter-reference``: what computes the reference, what stays, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

from pytest_trlcompat import stack, tiny  # noqa: E402 - needs the stack
from pytest_trlcompat.launch import Launcher  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers import CureError, cured  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers.adapters.adapter_reference import AdapterReferenceMixin  # noqa: E402 - needs the stack
from pytest_trlcompat.training.aliases import accepted  # noqa: E402 - after the stack

RELEASE = Version(stack.installed()["trl"])
needs_cure = pytest.mark.skipif(Version("0.27") <= RELEASE, reason="other releases keep the adapter themselves")
needs_none = pytest.mark.skipif(Version("0.27") > RELEASE, reason="this release needs the cure")


COPY = "trlcompat_as_given"


def tiny_model(folder: str = "") -> tiny.TinyModel:
    """Of such weights that its tokens differ."""
    more = {"directory": folder} if folder else {}
    return tiny.qwen2(num_hidden_layers=1, initializer_range=0.3, **more)


def adapted(folder: str = "", **settings: Any) -> Any:
    """A ``PeftModel`` whose adapter was trained."""
    wanted = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **settings}
    model = peft.get_peft_model(tiny_model(folder).new_model(), peft.LoraConfig(**wanted))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.fill_(0.3)
    return model


def built(folder: Any, model: Any, base: Any = None, beta: float = 0.1, peft_config: Any = None, **more: Any) -> Any:
    """A corrected trainer of one step."""
    settings = {
        "output_dir": str(folder),
        "report_to": "none",
        "save_strategy": "no",
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.5,
        "optim": "sgd",
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "beta": beta,
        "bf16": False,
        "gradient_checkpointing": False,
        **more,
    }
    from datasets import Dataset

    return cured(base or trl.GRPOTrainer)(
        model=model,
        reward_funcs=lambda completions, **_: [float(text.count("1")) for text in completions],
        args=trl.GRPOConfig(**accepted(trl.GRPOConfig, settings)),
        train_dataset=Dataset.from_list(tiny.prompts(8, words=4)),
        processing_class=tiny_model().tokenizer,
        peft_config=peft_config,
    )


def kls(trainer: Any) -> list[float]:
    return [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]


def adapters(model: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in model.named_parameters():
        if "lora_" in name:
            *path, adapter, _ = name.split(".")
            found.setdefault(adapter, {})[".".join(path)] = value
    return found


@needs_cure
@pytest.mark.parametrize("goes_on", [False, True], ids=["trl", "mine"])
def test_the_reference_is_the_adapter_as_it_was_given(tmp_path: Path, goes_on: bool) -> None:
    class Mine(trl.GRPOTrainer):  # type: ignore[name-defined] # of whichever release
        def _prepare_inputs(self, inputs: Any) -> Any:
            return super()._prepare_inputs(inputs)

    policy = adapted()
    trainer = built(tmp_path, policy, Mine if goes_on else None)
    trainer.train()
    first, second = kls(trainer)
    assert abs(first) < 1e-6 < second
    found = adapters(policy)
    assert set(found) == {"default", COPY}
    for name, value in found[COPY].items():
        assert torch.equal(value.cpu(), torch.full_like(value.cpu(), 0.3))
        assert not torch.equal(found["default"][name], value)
    assert policy.active_adapter == "default"
    assert {(name, value.requires_grad) for name in found for value in found[name].values()} == {
        ("default", True),
        (COPY, False),
    }
    assert list(policy.peft_config) == ["default"]
    activity = AdapterReferenceMixin._activity(type(trainer), trainer)
    assert (activity.active, activity.reason) == (
        True,
        "TRL computes the reference of a PeftModel without its adapter",
    )


@needs_cure
def test_upstreams_reference_is_the_model_without_the_adapter(tmp_path: Path) -> None:
    policy = adapted()
    trainer = built(tmp_path, policy)
    uncured = cured(trl.GRPOTrainer, without=["AdapterReferenceMixin"])
    assert not issubclass(uncured, AdapterReferenceMixin)
    trainer.__class__ = uncured
    trainer.train()
    assert kls(trainer)[0] > 1e-3


@needs_cure
@pytest.mark.parametrize("case", ["beta", "config", "plain", "untrained"])
def test_without_a_trained_adapter_or_a_reference_nothing_is_added(tmp_path: Path, case: str) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if case == "config" else None
    policy = adapted() if case in ("beta", "untrained") else tiny_model(str(tmp_path)).new_model()
    if case == "untrained":
        for name, parameter in policy.named_parameters():
            parameter.data.mul_("lora_B" not in name)
    trainer = built(tmp_path, policy, beta=0.0 if case == "beta" else 0.1, peft_config=config)
    assert set(adapters(trainer.model)) == ({"default"} if case != "plain" else set())
    assert trainer._given is None
    reason = "no adapter is trained" if case == "plain" else "no trained adapter was given, or beta is 0"
    assert AdapterReferenceMixin._activity(type(trainer), trainer).reason == reason


@needs_none
def test_where_trl_keeps_the_adapter_nothing_is_changed(tmp_path: Path) -> None:
    trainer = built(tmp_path, adapted())
    assert trainer._given is None
    assert set(adapters(trainer.model)) == {"default", "ref"}
    found = AdapterReferenceMixin._activity(type(trainer), trainer)
    assert (found.active, found.reason) == (False, "TRL disables no adapter to compute a reference")


def test_a_copy_has_the_same_weights_and_dtypes_and_is_not_trained() -> None:
    from pytest_trlcompat.trainers.adapters.adapter_reference import _add_copy

    policy = adapted(modules_to_save=["norm"])
    for name, parameter in policy.named_parameters():
        if "lora_A" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    _add_copy(policy)
    named = dict(policy.named_parameters())
    assert [name for name, parameter in named.items() if parameter.requires_grad] == trained
    assert len(trained) == 5
    for name in trained:
        twin = named[f"{name}.".replace(".default.", f".{COPY}.")[:-1]]
        assert torch.equal(twin, named[name])
        assert (twin.dtype, twin.data_ptr() == named[name].data_ptr()) == (named[name].dtype, False)


def test_what_cannot_have_a_copy_is_refused() -> None:
    from pytest_trlcompat.trainers.adapters.adapter_reference import _add_copy

    several = adapted()
    several.add_adapter("other", several.peft_config["default"])
    several.base_model.set_adapter(["default", "other"])
    with pytest.raises(CureError, match="several are active"):
        _add_copy(several)
    with pytest.raises(CureError, match="PEFT refuses it: .*bias"):
        _add_copy(adapted(bias="all"))
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    prompts = peft.get_peft_model(tiny_model().new_model(), config)
    with pytest.raises(CureError, match="PROMPT_TUNING has no layers that can be switched. Merge the adapter"):
        _add_copy(prompts)


def test_a_second_training_has_a_copy_of_what_the_first_one_made() -> None:
    from pytest_trlcompat.trainers.adapters.adapter_reference import _add_copy

    policy = adapted()
    _add_copy(policy)
    with torch.no_grad():
        for value in adapters(policy)["default"].values():
            value.fill_(0.7)
    _add_copy(policy)
    found = adapters(policy)
    assert set(found) == {"default", COPY}
    assert [value.unique().tolist() for value in found[COPY].values()] == [[pytest.approx(0.7)]] * 2


@needs_cure
def test_arguments_that_a_copy_does_not_serve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CureError, match="TRL syncs reference models, and no adapters"):
        built(tmp_path, adapted(), sync_ref_model=True)
    policy = adapted(modules_to_save=["norm"])
    with pytest.raises(CureError, match="TRL would send the copy of whole modules to vLLM"):
        built(tmp_path, policy, use_vllm=True)
    assert set(adapters(policy)) == {"default"}


@needs_cure
def test_a_reference_that_is_computed_otherwise_is_refused(tmp_path: Path) -> None:
    trainer = built(tmp_path, adapted())
    upstream = trl.GRPOTrainer._prepare_inputs
    trl.GRPOTrainer._prepare_inputs = lambda self, inputs: {"ref_per_token_logps": torch.zeros(1)}
    try:
        with pytest.raises(CureError, match="there is a reference, and no such call was seen"):
            trainer._prepare_inputs({})
    finally:
        trl.GRPOTrainer._prepare_inputs = upstream


def resumed(folder: str) -> dict[str, Any]:
    """A training, another that resumes it after one step, and what the first saved."""
    from accelerate.utils import set_seed

    from pytest_trlcompat.checks import CompatCallback

    def trained(more: str, **train: Any) -> Any:
        set_seed(0)
        trainer = built(f"{folder}/{more}", adapted(), save_strategy="steps", save_steps=1)
        trainer.add_callback(CompatCallback(trainer, on_failure="raise"))  # which reads the checkpoint back
        trainer.train(**train)
        return trainer

    straight = trained("a")
    again = trained("b", resume_from_checkpoint=f"{folder}/a/checkpoint-1")
    saved = sorted(str(path.relative_to(folder)) for path in Path(folder).glob("a/checkpoint-1/**/*.safetensors"))
    return {"straight": kls(straight), "again": kls(again), "saved": saved}


@needs_cure
def test_a_resumed_training_is_held_to_the_same_reference(launch: Launcher, tmp_path: Path) -> None:
    (found,) = launch(resumed, str(tmp_path), strategy="single").values
    assert found["saved"] == ["a/checkpoint-1/adapter_model.safetensors"]
    assert found["again"] == pytest.approx(found["straight"], rel=1e-4)
    assert found["straight"][1] > 1e-6


def step(folder: str) -> list[float]:
    trainer = built(folder, adapted(folder), learning_rate=0.2)
    trainer.train()
    return kls(trainer)


@needs_cure
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_under_each_strategy_the_first_step_is_the_reference(launch: Launcher, strategy: str, tmp_path: Path) -> None:
    if strategy == "fsdp2" and Version(stack.installed()["transformers"]) < Version("4.52"):
        pytest.skip("Transformers cannot train under FSDP2")
    for first, second in launch(step, str(tmp_path), strategy=strategy, sharded=False).values:
        assert abs(first) < 1e-5 < second
