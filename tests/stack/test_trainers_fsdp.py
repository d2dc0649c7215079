"""The cures for GRPO under FSDP: the reference model, generation, one device per rank, and when they keep still."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher, LaunchError

from .checks_bodies import TRAINS_FSDP2
from .fsdp_bodies import CPU_OFFLOAD, FLAT_PARAMETERS, FSDP2, FULL_SHARD, INSTALLED, NO_SHARD, describe

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    return tiny.qwen2(directory=tmp_path_factory.mktemp("models"), initializer_range=0.1)


# ---- what runs in the ranks


def build(subject: str, model: tiny.TinyModel, peft_config: Any = None, **settings: Any) -> Any:
    """A trainer for four completions per step over all ranks, whatever their number."""
    import inspect
    import os
    import tempfile

    import trl
    from transformers import AutoModelForCausalLM

    from pytest_trlcompat.trainers import GRPOTrainer

    known = inspect.signature(trl.GRPOConfig).parameters
    settings = {
        "output_dir": tempfile.mkdtemp(),
        "report_to": "none",
        "save_strategy": "no",
        "max_steps": 3,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4 // int(os.environ.get("WORLD_SIZE", "1")),
        "num_generations": 2,
        "max_completion_length": 6,
        "beta": 0.5,
        "loss_type": "grpo",
        "bf16": False,
        "gradient_checkpointing": False,
        **settings,
    }
    return (GRPOTrainer if subject == "corrected" else trl.GRPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager"),
        reward_funcs=lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions],
        args=trl.GRPOConfig(**{name: value for name, value in settings.items() if name in known}),
        train_dataset=tiny.prompts(16, words=(3, 6)),
        processing_class=model.tokenizer,
        peft_config=peft_config,
    )


def fix_completions(vocab_size: int) -> None:
    """Generation runs; then its tokens give way to ones that do not depend on how rows are spread over ranks."""
    import os

    import torch
    from transformers.generation import GenerationMixin

    generate, rank = GenerationMixin.generate, int(os.environ.get("RANK", "0"))
    calls: list[int] = []

    def fixed(self: Any, inputs: Any = None, **kwargs: Any) -> Any:
        output = generate(self, inputs, **kwargs)
        prompts = kwargs["input_ids"] if inputs is None else inputs
        rows = torch.arange(len(output)) + rank * len(output)
        seeds = len(calls) * 11 + rows[:, None] * 17 + torch.arange(6) * 5
        calls.append(len(output))
        return torch.cat([output[:, : prompts.size(1)], (3 + seeds % (vocab_size - 3)).to(output)], dim=1)

    GenerationMixin.generate = fixed


def construct(subject: str, model: tiny.TinyModel, **settings: Any) -> dict[str, Any]:
    trainer = build(subject, model, **settings)
    plugin = trainer.accelerator.state.fsdp_plugin
    callbacks = [
        one.ref_model is trainer.ref_model for one in trainer.callback_handler.callbacks if hasattr(one, "ref_model")
    ]
    return {
        **describe(trainer),
        "callbacks_follow": callbacks,
        "counted": len(trainer.accelerator._models),
        "wrap_policy": getattr(plugin.auto_wrap_policy, "__name__", repr(plugin.auto_wrap_policy)),
        "activation_checkpointing": plugin.activation_checkpointing,
    }


def train(subject: str, model: tiny.TinyModel) -> dict[str, Any]:
    fix_completions(model.vocab_size)
    trainer = build(subject, model)
    losses: list[float] = []
    compute_loss = trainer.compute_loss

    def recording(*args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(*args, **kwargs)
        losses.append(loss.item())
        return loss

    trainer.compute_loss = recording
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "kl" in entry]
    return {
        **describe(trainer),
        "losses": losses,
        "kl": [entry["kl"] for entry in logged],
        "grad_norms": [float(entry["grad_norm"]) for entry in logged],
        "policy": type(trainer.model_wrapped).__name__,
    }


def train_mixed(model: tiny.TinyModel, lora: bool) -> dict[str, Any]:
    """Three steps in bf16 of weights in fp32, with the dtype of the embeddings' output while it generates."""
    from peft import LoraConfig
    from transformers.generation import GenerationMixin

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None
    trainer = build("corrected", model, peft_config=config, bf16=True)
    seen: set[str] = set()
    generate = GenerationMixin.generate

    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight = self.get_input_embeddings().weight
        seen.add(f"{weight.dtype}, {weight.dim()} dimensions")
        return generate(self, *args, **kwargs)

    GenerationMixin.generate = watching
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "kl" in entry]
    stored = {str(parameter.dtype) for parameter in trainer.model.parameters() if parameter.numel()}
    return {
        "generates_with": sorted(seen),
        "stored": sorted(stored),
        "grad_norms": [float(entry["grad_norm"]) for entry in logged],
        "kl": [entry["kl"] for entry in logged],
    }


def generate_unevenly(model: tiny.TinyModel) -> int:
    """One rank's completions end at once, the other's never: both must go on calling their layers."""
    import os

    from transformers.generation import GenerationMixin

    generate = GenerationMixin.generate

    def uneven(self: Any, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        generation_config.eos_token_id = list(range(model.vocab_size)) if os.environ["RANK"] == "1" else None
        return generate(self, inputs, generation_config=generation_config, **kwargs)

    GenerationMixin.generate = uneven
    trainer = build("corrected", model, max_steps=1)
    trainer.train()
    return int(trainer.state.global_step)


def mean_losses(result: Any) -> list[float]:
    """Losses over all ranks, step by step."""
    per_rank = [value["losses"] for value in result.values]
    return [sum(step) / len(per_rank) for step in zip(*per_rank, strict=True)]


# ---- the reference model


@pytest.fixture(scope="module")
def single(launch: Launcher, model: tiny.TinyModel) -> dict[str, Any]:
    return dict(launch(train, "corrected", model, strategy="single").values[0])


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param(*FULL_SHARD, id="full_shard"),
        pytest.param(*FLAT_PARAMETERS, id="flat-parameters"),
        pytest.param(*NO_SHARD, id="no_shard"),
        pytest.param(*CPU_OFFLOAD, id="cpu-offload"),
        pytest.param(
            *FSDP2,
            id="fsdp2",
            marks=pytest.mark.skipif(not TRAINS_FSDP2, reason="this Trainer cannot train under FSDP2"),
        ),
    ],
)
def test_training_under_fsdp_equals_a_single_process(
    launch: Launcher, model: tiny.TinyModel, single: dict[str, Any], strategy: str, options: dict[str, Any]
) -> None:
    result = launch(train, "corrected", model, strategy=strategy, options=options)
    whole = sum(parameter.numel() for parameter in model.model.parameters())
    sharded = options.get("sharding_strategy") != "NO_SHARD"
    for rank in result.values:
        assert rank["sharded"]
        assert rank["class"] == rank["policy"]
        assert rank["devices"] == (["cpu"] if options.get("offload_params") else ["npu"])
        assert rank["local"] == (whole // 2 if sharded else whole)
        assert not rank["requires_grad"]
        assert not rank["training"]
        assert rank["kl"][0] == pytest.approx(0, abs=1e-6)
        assert rank["grad_norms"] == pytest.approx(single["grad_norms"], rel=1e-4)
    assert mean_losses(result) == pytest.approx(single["losses"], abs=1e-5)
    assert single["losses"][-1] > 0.1  # the reference model matters


@pytest.mark.parametrize(
    ("strategy", "options"), [pytest.param(*FULL_SHARD, id="full_shard"), pytest.param(*FSDP2, id="fsdp2")]
)
def test_the_plugin_stays_as_the_policy_needs_it(
    launch: Launcher, model: tiny.TinyModel, strategy: str, options: dict[str, Any]
) -> None:
    # trl 0.18's own prepare_fsdp leaves a policy with its arguments filled in, which Accelerate accepts under FSDP1.
    if strategy == "fsdp1" and stack.satisfied({"trl": ">=0.18"}, INSTALLED):
        pytest.skip("upstream prepares the reference model")
    result = launch(
        construct, "corrected", model, strategy=strategy, options={**options, "activation_checkpointing": True}
    )
    for rank in result.values:
        assert rank["on_own_device"]
        assert rank["counted"] == 0
        assert rank["local"] * 2 == sum(parameter.numel() for parameter in model.model.parameters())
        assert rank["activation_checkpointing"]
        if stack.satisfied({"trl": "<0.29"}, INSTALLED):
            assert rank["wrap_policy"] == "transformer_auto_wrap_policy"


def test_the_callback_that_synchronizes_follows_the_reference_model(launch: Launcher, model: tiny.TinyModel) -> None:
    strategy, options = FULL_SHARD
    result = launch(construct, "corrected", model, sync_ref_model=True, strategy=strategy, options=options)
    assert [rank["callbacks_follow"] for rank in result.values] == [[True], [True]]


def test_other_strategies_are_left_alone(launch: Launcher, model: tiny.TinyModel, single: dict[str, Any]) -> None:
    result = launch(train, "corrected", model, strategy="ddp")
    assert [rank["class"] for rank in result.values] == ["Qwen2ForCausalLM"] * 2
    assert mean_losses(result) == pytest.approx(single["losses"], abs=1e-5)


def test_ranks_that_end_generation_at_different_steps_do_not_hang(launch: Launcher, model: tiny.TinyModel) -> None:
    strategy, options = FULL_SHARD
    assert launch(generate_unevenly, model, strategy=strategy, options=options, timeout=60).values == [1, 1]


# ---- when the cures have gone stale


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_under_mixed_precision_it_generates_in_the_dtype_of_the_layers(
    launch: Launcher, model: tiny.TinyModel, lora: bool
) -> None:
    strategy, options = FULL_SHARD
    options = {**options, "transformer_cls_to_wrap": model.decoder_layer}
    for rank in launch(train_mixed, model, lora, strategy=strategy, options=options).values:
        assert rank["generates_with"] == ["torch.bfloat16, 2 dimensions"]
        assert rank["stored"] == ["torch.float32"]
        assert len(rank["grad_norms"]) == 3
        assert all(0 < norm < 100 for norm in rank["grad_norms"])
        assert rank["kl"][0] == pytest.approx(0, abs=1e-6)


def test_upstream_needs_the_cure_where_we_say_so(launch: Launcher, model: tiny.TinyModel) -> None:
    strategy, options = FULL_SHARD
    if stack.satisfied({"trl": "<0.18"}, INSTALLED):
        result = launch(construct, "upstream", model, strategy=strategy, options=options, sharded=False)
        assert [(rank["sharded"], rank["devices"], rank["counted"]) for rank in result.values] == [
            (False, ["cpu"], 1)
        ] * 2
    elif stack.satisfied({"trl": ">=0.26"}, INSTALLED):
        with pytest.raises(LaunchError, match="Inconsistent compute device and `device_id`"):
            launch(construct, "upstream", model, strategy=strategy, options=options)


def test_the_cures_know_what_the_installed_trl_can() -> None:
    import trl

    from pytest_trlcompat.trainers.curing.upstream import class_uses, function_uses

    module = import_module("trl.trainer.grpo_trainer")

    def at_least(release: str) -> bool:
        return stack.satisfied({"trl": f">={release}"}, INSTALLED)

    assert hasattr(module, "unwrap_model_for_generation")
    assert hasattr(module, "prepare_fsdp") == at_least("0.18")
    assert class_uses(trl.GRPOTrainer, "summon_full_params") == at_least("0.18")
    assert hasattr(module, "create_model_from_path") == at_least("0.26")
    if at_least("0.18"):
        assert function_uses(module.prepare_fsdp, "fully_shard") == at_least("0.29")
