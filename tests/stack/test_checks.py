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

    forgive_trl()

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


def forgive_trl() -> None:
    """Give all arguments what trl 0.17 and 0.18, once imported, make them look for with Transformers before 4.51."""
    import transformers

    transformers.TrainingArguments.model_init_kwargs = None


def watch(trainer: Any, **settings: Any) -> dict[str, Any]:
    """Train with the callback; what was checked, how it came out, and the log."""
    import dataclasses

    from pytest_trlcompat.checks import CompatCallback

    callback = CompatCallback(trainer, **settings)
    trainer.add_callback(callback)
    trainer.train()
    found = {
        each.check: dict(vars(each.found)) if dataclasses.is_dataclass(each.found) else each.found
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


# Transformers 5 makes inputs require gradients wherever it checkpoints; there the graph is cut by hand.
ADAPTERS_CAN_MISS_GRADIENTS = stack.satisfied({"transformers": "<5"}, INSTALLED)


def train_without_input_gradients(folder: str) -> dict[str, Any]:
    """trl 3150 where it is silent: the output head is adapted as well, so that backward finds something to do."""
    trainer = build(folder, lora={"target_modules": ["q_proj", "v_proj", "lm_head"]})
    base = trainer.model.get_base_model()
    if ADAPTERS_CAN_MISS_GRADIENTS:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    else:
        base.model.norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),))
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


# ---- logits


def ask_for_logits(folder: str) -> dict[str, Any]:
    """What the check says of a model within a training: as it is, asked by a keyword that it ignores, and spoiled."""
    from pytest_trlcompat.checks import check_logits
    from pytest_trlcompat.checks._models import unwrapped
    from pytest_trlcompat.trainers.logits_to_keep import KEYWORDS, logits_keyword

    trainer = build(folder, max_steps=1, save_strategy="no")
    trainer.train()
    model, inner = trainer.model_wrapped, unwrapped(trainer.model_wrapped)
    said: dict[str, Any] = {"right": check_logits(model, 5), "training": inner.training}
    said["ignored"] = {keyword: check_text(check_logits, model, 5, keyword=keyword) for keyword in KEYWORDS}
    forward, works = inner.forward, logits_keyword(model)

    def read_the_first(*args: Any, **kwargs: Any) -> Any:
        kept = kwargs.pop(str(works), None)
        output = forward(*args, **kwargs)
        if kept is not None:
            output.logits = output.logits[:, :kept]
        return output

    inner.forward = read_the_first
    said["first"] = check_text(check_logits, model, 5, keyword=works)
    return said


OLD_KEYWORD_HONOURED = stack.satisfied({"transformers": "<4.52"}, INSTALLED)
NEW_KEYWORD_HONOURED = stack.satisfied({"transformers": ">=4.49"}, INSTALLED)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_logits_that_are_not_short_or_not_the_right_ones_are_told(
    launcher: Launcher, strategy: str, tmp_path: Path
) -> None:
    for said in launcher(ask_for_logits, str(tmp_path), strategy=strategy, options=options(strategy)).values:
        assert said["right"]["length"] == 5
        assert said["right"]["keyword"] == ("logits_to_keep" if NEW_KEYWORD_HONOURED else "num_logits_to_keep")
        assert said["right"]["max_abs_error"] <= 1e-5 < said["right"]["tolerance"] == 1e-4
        assert said["training"]  # as it was before
        for keyword, honoured in (
            ("num_logits_to_keep", OLD_KEYWORD_HONOURED),
            ("logits_to_keep", NEW_KEYWORD_HONOURED),
        ):
            text = said["ignored"][keyword]
            if honoured:
                assert text.startswith("passed: ")
            else:
                assert text.startswith("asked Qwen2ForCausalLM for the logits of the last 5 positions by")
                assert f"{keyword}=5, but it returned 9: it ignores the keyword" in text
        assert "log-probabilities read from the 5 logits that Qwen2ForCausalLM returns for" in said["first"]
        assert "Are they those of other positions?" in said["first"]


# ---- TRL's trainers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    """MODEL on disk, where GRPO looks for its reference model."""
    return tiny.qwen2(initializer_range=0.1, directory=tmp_path_factory.mktemp("models"))


def grpo(subject: str, model: tiny.TinyModel, folder: str, watched: bool = True, **settings: Any) -> dict[str, Any]:
    """TRL's GRPO trainer, or the corrected one, for two steps."""
    from suites import grpo

    grpo.fix_completions(model.vocab_size)
    values = {"max_steps": 2, "output_dir": folder, "save_strategy": "steps", "save_steps": 2, **settings}
    trainer = grpo.build_trainer(subject, model, **values)
    if watched:
        return watch(trainer)
    trainer.train()
    return {"log": trainer.state.log_history}


has_grpo = pytest.mark.versions(trl=">=0.14", reason="GRPOTrainer")
SHARDINGS = {"ddp": "none", "zero2": "none", "zero3": "zero3", "fsdp1": "fsdp1 FULL_SHARD", "fsdp2": "fsdp2"}


@has_grpo
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp1", "fsdp2"])
def test_the_corrected_grpo_trainer_passes_every_check(
    launcher: Launcher, saved: tiny.TinyModel, strategy: str, tmp_path: Path
) -> None:
    arguments = ("corrected", saved, str(tmp_path))
    ranks = launcher(grpo, *arguments, strategy=strategy, options=options(strategy)).values
    for number, rank in enumerate(ranks):
        assert [check for check, _ in rank["checked"]] == [
            "trainable",
            "reference",
            "logits",
            "gradients",
            "moved",
            "checkpoint",
        ]
        reference = rank["found"]["reference"]
        assert reference["sharding"] == SHARDINGS[strategy]
        assert reference["devices"] == [f"npu:{number}"]
        assert reference["dtypes"] == reference["policy_dtypes"] == ["torch.float32"]
        assert rank["found"]["moved"]["moved"] == TENSORS
    assert ranks[0]["found"]["checkpoint"]["tensors"] == TENSORS


@pytest.mark.versions(trl=">=0.14,<0.18", reason="later releases shard the reference model")
def test_a_reference_model_on_the_cpu_is_told(launcher: Launcher, saved: tiny.TinyModel, tmp_path: Path) -> None:
    text = failure(launcher, grpo, "upstream", saved, str(tmp_path), strategy="fsdp1")
    for rank in (0, 1):
        assert (
            f"rank {rank} of 2: asked for a reference model placed and sharded like the policy, but "
            f"devices: cpu instead of npu:{rank}; sharding: none instead of fsdp1 FULL_SHARD."
        ) in text


def reference_in_training_mode() -> str:
    from pytest_trlcompat.checks import check_reference_model

    policy = MODEL.new_model()
    return check_text(check_reference_model, MODEL.new_model().train(), policy)


def test_a_reference_model_in_training_mode_is_told(launcher: Launcher) -> None:
    (text,) = launcher(reference_in_training_mode, strategy="single").values
    assert "it is in training mode, so dropout is on" in text


IGNORED = {
    "num_logits_to_keep": {"trl": ">=0.14,<0.15", "transformers": ">=4.52"},
    "logits_to_keep": {"trl": ">=0.15,<0.18", "transformers": "<4.49"},
}
"""Keywords that GRPO trainers use and models ignore."""


def test_a_keyword_that_grpo_uses_and_the_model_ignores_is_told(
    launcher: Launcher, saved: tiny.TinyModel, tmp_path: Path
) -> None:
    keyword = next((name for name, ranges in IGNORED.items() if stack.satisfied(ranges, INSTALLED)), None)
    if keyword is None:
        pytest.skip("the installed GRPO trainer and Transformers agree on the keyword")
    text = failure(launcher, grpo, "upstream", saved, str(tmp_path))
    assert f"asked Qwen2ForCausalLM for the logits of the last 6 positions by {keyword}=6, but it returned 20" in text


@has_grpo
def test_the_callback_leaves_training_and_logs_as_they_are(
    launcher: Launcher, saved: tiny.TinyModel, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "logging_steps": 2, "save_strategy": "no"}
    logs = [
        launcher(grpo, "corrected", saved, str(tmp_path), watched, strategy="single", **settings).values[0]["log"]
        for watched in (False, True)
    ]
    alone, together = ([entry for entry in log if "memory/host_bytes" not in entry] for log in logs)
    assert [entry["step"] for entry in alone if "loss" in entry] == [2, 4]
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        same = [key for key in one if not any(word in key for word in ("time", "runtime", "per_second"))]
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
    memory = [entry for entry in logs[1] if "memory/host_bytes" in entry]
    assert [entry["step"] for entry in memory] == [1, 2, 3, 4]
    for entry in memory:
        assert entry["memory/host_peak_bytes"] >= entry["memory/host_bytes"] > 100e6
        assert entry["memory/accelerator_peak_bytes"] >= entry["memory/accelerator_bytes"] > 4 * 20e3


def ppo(folder: str, train: bool) -> Any:
    """TRL's PPO trainer, for two updates, or only made; saves of the policy as TRL and others have made them."""
    import datasets
    import transformers
    from accelerate.state import AcceleratorState

    trainer_class, config_class = ppo_classes()
    policy, reference = MODEL.new_model(), MODEL.new_model()
    sizes = {key: value for key, value in MODEL.config.to_dict().items() if key not in ("id2label", "label2id")}
    scorer = transformers.Qwen2Config(**{**sizes, "num_labels": 1})
    value, reward = (transformers.Qwen2ForSequenceClassification(scorer) for _ in range(2))
    values = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "total_episodes": 4,
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
        "response_length": 4,
        "local_rollout_forward_batch_size": 2,
        "num_sample_generations": 0,
        "learning_rate": 1e-2,
        "save_steps": 1,
        "report_to": "none",
        "bf16": False,
    }
    forgive_trl()
    args = config_class(**values)
    if hasattr(AcceleratorState, "_reset_state"):  # PPO makes a second accelerator, which some releases refuse
        AcceleratorState._reset_state(True)
    prompts = datasets.Dataset.from_dict({"input_ids": [[3 + row, 4 + row, 5 + row] for row in range(8)]})
    trainer = trainer_class(args, MODEL.tokenizer, policy, reference, reward, prompts, value_model=value)
    return watch(trainer) if train else trap(folder, trainer)


def ppo_classes() -> tuple[Any, Any]:
    from importlib import import_module

    for place, name, config in (
        ("trl", "PPOv2Trainer", "PPOv2Config"),
        ("trl.experimental.ppo", "PPOTrainer", "PPOConfig"),
        ("trl", "PPOTrainer", "PPOConfig"),
    ):
        try:
            module = import_module(place)
            return getattr(module, name), getattr(module, config)
        except (ImportError, AttributeError):
            continue
    raise LookupError("PPO")


def trap(folder: str, trainer: Any) -> dict[str, Any]:
    """The published workaround that saves nothing, and the one that is right."""
    from pytest_trlcompat.checks import check_checkpoint
    from pytest_trlcompat.checks._models import unwrapped

    first, policy = trainer.accelerator.is_main_process, unwrapped(trainer.model).policy
    if first:
        policy.save_pretrained(f"{folder}/trap")
    gathered = trainer.accelerator.get_state_dict(trainer.model)
    if first:
        kept = {name.removeprefix("policy."): each for name, each in gathered.items() if name.startswith("policy.")}
        policy.save_pretrained(f"{folder}/right", state_dict=kept)
    return {
        "trap": check_text(check_checkpoint, f"{folder}/trap", trainer.model, prefix="policy."),
        "right": check_checkpoint(f"{folder}/right", trainer.model, prefix="policy."),
    }


has_ppo = pytest.mark.versions(trl=">=0.11,<1.13", reason="PPOv2Trainer, PPOTrainer")


@has_ppo
def test_ppo_passes_every_check(launcher: Launcher, tmp_path: Path) -> None:
    (rank,) = launcher(ppo, str(tmp_path), True, strategy="single").values
    assert [check for check, _ in rank["checked"]] == [
        "trainable",
        "reference",
        "logits",
        "gradients",
        "moved",
        "checkpoint",
    ]
    assert rank["found"]["checkpoint"]["tensors"] == TENSORS  # the policy's alone
    assert sum("memory/host_bytes" in entry for entry in rank["log"]) == 2


@has_ppo
def test_ppo_saved_with_empty_tensors_under_zero3_is_told(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher(ppo, str(tmp_path), False, strategy="zero3").values
    assert ranks[0]["right"]["tensors"] == TENSORS
    for rank in ranks:
        assert f"empty: {TENSORS} (" in rank["trap"]
        assert "model.embed_tokens.weight (0,) instead of (64, 32)" in rank["trap"]


# ---- what the callback puts off, and its arguments


def test_zeros_are_waited_for_and_then_told(launcher: Launcher, tmp_path: Path) -> None:
    text = failure(launcher, train, str(tmp_path), factor=0.0, checks={"patience": 2}, max_steps=4, save_strategy="no")
    assert f"nothing but zeros came to {TENSORS} (model.embed_tokens.weight" in text
    (rank,) = trained(launcher, "single", tmp_path, factor=0.0, checks={"checks": ["gradients"]})
    assert rank["checked"] == []  # two steps are within its patience


def test_movement_is_judged_once_the_learning_rate_is_not_zero(launcher: Launcher, tmp_path: Path) -> None:
    settings = {"lr_scheduler_type": "linear", "warmup_steps": 2, "max_steps": 3}
    (rank,) = trained(launcher, "single", tmp_path, **settings)
    assert rank["errors"] == []
    assert ("gradients", 0) in rank["checked"]
    assert ("moved", 2) in rank["checked"]


def test_chosen_checks_run_and_no_other(launcher: Launcher, tmp_path: Path) -> None:
    settings = {"checks": ["checkpoint"], "every_save": True}
    (rank,) = trained(launcher, "single", tmp_path, checks=settings, max_steps=4)
    assert rank["checked"] == [("checkpoint", 2), ("checkpoint", 4)]
    assert not any("memory/host_bytes" in entry for entry in rank["log"])


def test_unknown_arguments_are_refused() -> None:
    from pytest_trlcompat.checks import CompatCallback

    with pytest.raises(ValueError, match="unknown checks logit; known are trainable, reference, logits, "):
        CompatCallback(None, checks=["logit"])
    with pytest.raises(ValueError, match="on_failure='ignore' is neither 'raise' nor 'warn'"):
        CompatCallback(None, on_failure="ignore")
