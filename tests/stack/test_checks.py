"""Checks on real trainings under each strategy: each passes where nothing is wrong, and says what is where it is.

Failing cases are known bugs of the installed releases where these have them, else faults planted into a training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher

pytest.importorskip("trl")

INSTALLED = stack.installed()
# Transformers' Trainer prepares the model without the optimizer before 4.51, which Accelerate refuses under FSDP2.
TRAINS_FSDP2 = stack.satisfied({"transformers": ">=4.51", "accelerate": ">=1.6"}, INSTALLED)
STRATEGIES = ("single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2")
MODEL = tiny.qwen2(initializer_range=0.1)
TENSORS = 27
"""Of MODEL, none of which is tied."""
ADAPTED = 4
"""Layers of MODEL that ADAPTER adapts."""
ADAPTER = {"target_modules": ["q_proj", "v_proj"]}


def options(strategy: str) -> dict[str, Any]:
    if strategy == "fsdp2" and not TRAINS_FSDP2:
        pytest.skip("this stack cannot train under FSDP2")
    return {"transformer_cls_to_wrap": MODEL.decoder_layer} if strategy.startswith("fsdp") else {}


def trained(launcher: Launcher, strategy: str, folder: Path, **settings: Any) -> list[Any]:
    """What :func:`train` returns on each rank."""
    return launcher(train, str(folder), strategy=strategy, options=options(strategy), **settings).values


# ---- what runs in the ranks


def build(folder: str, *, lora: Any = None, left_out: int = 0, factor: float = 1.0, **settings: Any) -> Any:
    """A plain ``transformers.Trainer`` of a tiny model, or of a LoRA of it, which saves at its second step.

    Args:
        left_out: trainable parameters that the optimizer lacks.
        factor: of the loss.
    """
    import transformers

    policy = MODEL.new_model()
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        policy = get_peft_model(policy, LoraConfig(r=4, **lora))
    rows = [{"input_ids": [(row * 7 + column) % 60 + 3 for column in range(12)]} for row in range(16)]
    for row in rows:
        row["labels"], row["attention_mask"] = row["input_ids"], [1] * 12
    values = {
        "output_dir": folder,
        "max_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "bf16": False,
        **settings,
    }

    # trl 0.17 and 0.18, once imported, make all arguments look for this attribute with Transformers before 4.51.
    transformers.TrainingArguments.model_init_kwargs = None

    class OneGroup(transformers.Trainer):
        def create_optimizer(self, *_: Any) -> Any:
            # The usual second group, without weight decay, is empty for an adapter; DeepSpeed drops it, and torch 2.13
            # minds that schedulers then have more groups than optimizers.
            import torch

            trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(trainable[left_out:], lr=self.args.learning_rate, weight_decay=0.0)
            return self.optimizer

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * factor

    return OneGroup(model=policy, args=transformers.TrainingArguments(**values), train_dataset=rows)


def watch(trainer: Any, **settings: Any) -> dict[str, Any]:
    """Train with the callback; what was checked, how it came out, and the log."""
    import dataclasses

    from pytest_trlcompat.checks import CompatCallback

    callback = CompatCallback(trainer, **settings)
    trainer.add_callback(callback)
    trainer.train()
    found = {
        each.check: dataclasses.asdict(each.found) if dataclasses.is_dataclass(each.found) else each.found
        for each in callback.outcomes
    }
    return {
        "checked": [(each.check, each.step) for each in callback.outcomes],
        "errors": [each.error for each in callback.outcomes if each.error is not None],
        "found": found,
        "log": trainer.state.log_history,
    }


def train(folder: str, checks: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    return watch(build(folder, **settings), **(checks or {}))


# ---- a training in which nothing is wrong


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_right_training_passes_every_check(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
    ranks = trained(launcher, strategy, tmp_path)
    for rank in ranks:
        assert rank["checked"] == [
            ("trainable", 0),
            ("logits", 0),
            ("gradients", 0),
            ("moved", 1),
            ("checkpoint", 2),
        ]
        assert rank["errors"] == []
        assert rank["found"]["trainable"] == {"trainable": TENSORS, "frozen": 0, "lora": 0}
        assert rank["found"]["logits"] == 0  # a plain trainer asks for all logits
        assert len(rank["found"]["gradients"]["reached"]) == TENSORS
        assert rank["found"]["moved"] == {"moved": TENSORS, "frozen": 0}
        assert [entry["step"] for entry in rank["log"] if "loss" in entry] == [1, 2]
    saved = ranks[0]["found"]["checkpoint"]
    assert saved["tensors"] == TENSORS
    assert saved["bytes"] == sum(4 * each.numel() for each in MODEL.model.parameters())
    assert {rank["found"]["checkpoint"]["tensors"] for rank in ranks[1:]} <= {0}


ADAPTER_SAVED_EMPTY = stack.satisfied({"peft": ">=0.21"}, INSTALLED)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_right_training_of_an_adapter_passes_every_check(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
    ranks = trained(launcher, strategy, tmp_path, lora=ADAPTER, checks={"on_failure": "warn"})
    trainable = 2 * ADAPTED
    for rank in ranks:
        assert rank["found"]["trainable"] == {"trainable": trainable, "frozen": TENSORS, "lora": trainable}
        gradients = rank["found"]["gradients"]
        assert [name.split(".")[-3] for name in gradients["reached"]] == ["lora_B"] * ADAPTED
        assert [name.split(".")[-3] for name in gradients["zero"]] == ["lora_A"] * ADAPTED
        assert rank["found"]["moved"] == {"moved": ADAPTED, "frozen": TENSORS}
    if strategy == "fsdp1" and ADAPTER_SAVED_EMPTY:
        # A bug of PEFT that no tracker knew: it looks for names with the wrapper's prefix in a state dict without.
        for rank in ranks:
            (error,) = rank["errors"]
            assert "adapter_model.safetensors does not reload as the live model" in error
            assert f"missing: {2 * ADAPTED} (base_model.model.model.layers.0.self_attn.q_proj.lora_A.default" in error
    else:
        assert [rank["errors"] for rank in ranks] == [[]] * len(ranks)
        assert ranks[0]["found"]["checkpoint"]["tensors"] == trainable


# ---- trainings in which something is


def failure(launcher: Launcher, body: Any, *args: Any, strategy: str = "single", **settings: Any) -> str:
    """The text of the CheckError that every rank raises."""
    result = launcher(body, *args, strategy=strategy, options=options(strategy), check=False, **settings)
    assert [rank.failure and rank.failure.type_name for rank in result.ranks] == ["CheckError"] * len(result.ranks)
    texts = {rank.failure.message for rank in result.ranks if rank.failure is not None}
    assert len(texts) == 1, texts  # all ranks say the same
    return str(texts.pop())


def train_without_input_gradients(folder: str) -> dict[str, Any]:
    """trl 3150 where it is silent: the output head is adapted as well, so that backward finds something to do."""
    trainer = build(folder, lora={"target_modules": ["q_proj", "v_proj", "lm_head"]})
    base = trainer.model.get_base_model()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return watch(trainer)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_that_no_gradient_reaches_are_named(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
    text = failure(launcher, train_without_input_gradients, str(tmp_path), strategy=strategy)
    assert text.startswith(f"asked for a gradient of each of the {2 * ADAPTED + 2} trainable parameters, but")
    assert f"came to {2 * ADAPTED} (base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight, " in text
    assert "lm_head" not in text
    assert "call model.enable_input_require_grads() or use_reentrant=False" in text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_are_not_finite_are_named(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
    text = failure(launcher, train, str(tmp_path), strategy=strategy, factor=float("nan"))
    assert f"asked for a gradient of each of the {TENSORS} trainable parameters, but NaN or infinity came to" in text
    assert "model.embed_tokens.weight" in text


def train_writing_to_frozen_weights(folder: str, left_out: int) -> dict[str, Any]:
    """The optimizer lacks some trainable parameters, and after a step something writes to a frozen one."""
    import torch
    import transformers

    from pytest_trlcompat.checks._models import local_shard

    trainer = build(folder, lora=ADAPTER, left_out=left_out)

    class Writing(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            for name, parameter in trainer.model.named_parameters():
                if name.endswith("layers.1.mlp.up_proj.weight") or ("layers.1" in name and "up_proj" in name):
                    with torch.no_grad():
                        local_shard(parameter).add_(1.0)

    trainer.add_callback(Writing())
    return watch(trainer, on_failure="warn")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_moves_and_must_not_or_must_and_does_not_is_named(
    launcher: Launcher, strategy: str, tmp_path: Path
) -> None:
    left_out = 0 if strategy == "zero3" else 2  # ZeRO-3 keeps no gradient of what its optimizer lacks
    body = train_writing_to_frozen_weights
    ranks = launcher(body, str(tmp_path), left_out, strategy=strategy, options=options(strategy)).values
    query = "base_model.model.model.layers.0.self_attn.q_proj"
    for rank in ranks:
        assert rank["errors"] == ranks[0]["errors"]
        (moved,) = (error for error in rank["errors"] if error.startswith("asked that a step moves"))
        assert "the frozen parameters 1 (base_model.model.model.layers.1.mlp.up_proj.weight) changed" in moved
        if left_out:
            assert f"it lacks 2 ({query}.lora_A.default.weight, {query}.lora_B.default.weight)" in rank["errors"][0]
            assert f"1 ({query}.lora_B.default.weight) had a gradient and did not move" in moved


def save_and_spoil(folder: str) -> dict[str, Any]:
    """What the check says of a right save, and of ones with a tensor changed, left out, added, emptied and cast."""
    import torch
    from safetensors.torch import load_file, save_file

    from pytest_trlcompat.checks import CheckError, check_checkpoint
    from pytest_trlcompat.checks._models import whole_tensors

    trainer = build(folder, max_steps=1, save_strategy="no")
    trainer.train()
    model, first = trainer.model_wrapped, trainer.accelerator.is_main_process
    right = {name: tensor.cpu().clone() for name, _, tensor in whole_tensors(model)}
    path = Path(folder) / "model.safetensors"

    def check(**changes: Any) -> Any:
        if first:
            kept = {name: tensor for name, tensor in {**right, **changes}.items() if tensor is not None}
            save_file(kept, path)
        try:
            return check_checkpoint(folder, model)
        except CheckError as error:
            return str(error)

    head = right["lm_head.weight"]
    said = {
        "right": check(),
        "changed": check(**{"lm_head.weight": head + 0.25 * (torch.arange(head.numel()) == 7).reshape(head.shape)}),
        "left out": check(**{"lm_head.weight": None}),
        "added": check(surplus=torch.ones(1)),
        "emptied": check(**{name: torch.empty(0) for name in right}),
        "cast": check(**{"lm_head.weight": head.bfloat16()}),
        "cut": None,
    }
    if first:
        assert load_file(path)
        path.write_bytes(path.read_bytes()[:1000])
    said["cut"] = check_text(check_checkpoint, folder, model)
    return said


def check_text(check: Any, *args: Any, **settings: Any) -> str:
    """What a check that fails says."""
    from pytest_trlcompat.checks import CheckError

    try:
        return f"passed: {check(*args, **settings)}"
    except CheckError as error:
        return str(error)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_that_would_not_reload_equal_is_told(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
    ranks = launcher(save_and_spoil, str(tmp_path), strategy=strategy, options=options(strategy)).values
    assert ranks[0]["right"]["tensors"] == TENSORS
    for said in ranks:
        assert "does not reload as the live model" in said["changed"]
        assert "different: 1 (lm_head.weight (by 0.25 at most))." in said["changed"]
        assert "missing: 1 (lm_head.weight)." in said["left out"]
        assert "unexpected: 1 (surplus)." in said["added"]
        assert f"empty: {TENSORS} (lm_head.weight (0,) instead of (64, 32)," in said["emptied"] or (
            f"empty: {TENSORS} (model.embed_tokens.weight (0,) instead of (64, 32)," in said["emptied"]
        )
        assert "different: 1 (lm_head.weight (type torch.bfloat16 instead of torch.float32))." in said["cast"]
        assert "could not be checked: SafetensorError" in said["cut"]


def memory_of_one_rank(folder: str) -> dict[str, Any]:
    """The second rank alone goes beyond the limit."""
    import torch

    trainer = build(folder, save_strategy="no")
    if trainer.accelerator.process_index == 1:
        torch.empty(64 << 20, dtype=torch.uint8, device=trainer.accelerator.device)
    return watch(trainer, accelerator_limit=32 << 20)


def test_ranks_take_one_decision(launcher: Launcher, tmp_path: Path) -> None:
    text = failure(launcher, memory_of_one_rank, str(tmp_path), strategy="ddp")
    assert text.startswith("rank 1 of 2: asked for memory within its limits, but the accelerator's peak is 67")
    assert text.endswith(" of 33554432 bytes (32 MiB) allowed")


def fail_unexpectedly_on_one_rank() -> None:
    from accelerate import PartialState

    from pytest_trlcompat.checks._ranks import together

    rank = PartialState().process_index
    with together("something"):
        if rank == 1:
            raise KeyError("lost")


def test_a_check_that_itself_fails_on_one_rank_fails_on_all(launcher: Launcher) -> None:
    text = failure(launcher, fail_unexpectedly_on_one_rank, strategy="ddp", sharded=False)
    assert text == "rank 1 of 2: something could not be checked: KeyError: 'lost'"


# ---- TRL's trainers


def grpo(subject: str, folder: str, watched: bool = True, **settings: Any) -> dict[str, Any]:
    """TRL's GRPO trainer or the corrected one, of a tiny model, for two steps."""
    from suites import grpo

    grpo.fix_completions(MODEL.vocab_size)
    values = {"max_steps": 2, "output_dir": folder, "save_strategy": "steps", "save_steps": 2, **settings}
    trainer = grpo.build_trainer(subject, MODEL, arguments={"model": MODEL.new_model()}, **values)
    if watched:
        return watch(trainer)
    trainer.train()
    return {"log": trainer.state.log_history}


has_grpo = pytest.mark.versions(trl=">=0.14", reason="GRPOTrainer")
