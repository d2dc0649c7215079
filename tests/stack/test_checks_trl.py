"""Checks on TRL's own trainers: known bugs of the installed releases, their cures, and what is left as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher

from .checks_bodies import (
    INSTALLED,
    MODEL,
    TENSORS,
    check_text,
    failure,
    forgive_trl,
    options,
    watch,
)

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    """MODEL on disk, where GRPO looks for its reference model."""
    return tiny.qwen2(initializer_range=0.1, directory=tmp_path_factory.mktemp("models"))


def grpo(
    subject: str, model: tiny.TinyModel, folder: str, watched: bool = True, survive: bool = False, **settings: Any
) -> dict[str, Any]:
    """TRL's GRPO trainer, or the corrected one, for two steps."""
    from suites.in_rank import grpo

    grpo.fix_completions(model.vocab_size)
    values = {"max_steps": 2, "output_dir": folder, "save_strategy": "steps", "save_steps": 2, **settings}
    trainer = grpo.build_trainer(subject, model, **values)
    if watched:
        return watch(trainer, survive=survive)
    trainer.train()
    return {"log": trainer.state.log_history}


has_grpo = pytest.mark.versions(trl=">=0.14", reason="GRPOTrainer")
SHARDINGS = {"ddp": "none", "zero2": "none", "zero3": "zero3", "fsdp1": "fsdp1 FULL_SHARD", "fsdp2": "fsdp2"}


@has_grpo
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp1", "fsdp2"])
def test_the_corrected_grpo_trainer_passes_every_check(
    launcher: Launcher, saved: tiny.TinyModel, strategy: str, tmp_path: Path
) -> None:
    if strategy == "zero3" and stack.satisfied({"trl": "<0.15", "deepspeed": ">=0.16.4"}, INSTALLED):
        pytest.skip("this TRL and this DeepSpeed cannot generate under ZeRO-3 (trl 2962)")
    arguments = ("corrected", saved, str(tmp_path))
    ranks = launcher(grpo, *arguments, strategy=strategy, options=options(strategy)).values
    for number, rank in enumerate(ranks):
        assert [check for check, _ in rank["checked"]] == [
            "trainable",
            "reference",
            "ranks",
            "logits",
            "gradients",
            "moved",
            "forward",
            "checkpoint",
        ]
        assert rank["errors"] == []
        reference = rank["found"]["reference"]
        assert reference["sharding"] == SHARDINGS[strategy]
        assert reference["devices"] == [f"npu:{number}"]
        assert reference["dtypes"] == reference["policy_dtypes"] == ["torch.float32"]
        assert rank["found"]["moved"]["moved"] == TENSORS
    assert ranks[0]["found"]["checkpoint"]["tensors"] == TENSORS


@pytest.mark.versions(trl=">=0.14,<0.18", reason="later releases shard the reference model")
def test_a_reference_model_on_the_cpu_is_reported(launcher: Launcher, saved: tiny.TinyModel, tmp_path: Path) -> None:
    text = failure(launcher, grpo, "upstream", saved, str(tmp_path), strategy="fsdp1")
    for rank in (0, 1):
        assert (
            f"rank {rank} of 2: expected a reference model placed and sharded like the policy, but "
            f"devices: cpu instead of npu:{rank}; sharding: none instead of fsdp1 FULL_SHARD; "
        ) in text


def reference_in_training_mode() -> tuple[str, str]:
    from pytest_trlcompat.checks import check_reference_model

    policy, reference = MODEL.new_model(), MODEL.new_model().train()
    without = check_text(check_reference_model, reference, policy)
    for layer in reference.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return without, check_text(check_reference_model, reference, policy)


def test_a_reference_model_in_training_mode_is_reported(launcher: Launcher) -> None:
    ((without, text),) = launcher(reference_in_training_mode, strategy="single").values
    assert without.startswith("passed: ")  # there is no dropout that could be on
    assert "it is in training mode, so dropout is on" in text


IGNORED = {
    "num_logits_to_keep": {"trl": ">=0.14,<0.15", "transformers": ">=4.52"},
    "logits_to_keep": {"trl": ">=0.15,<0.18", "transformers": "<4.49"},
}
"""Keywords that GRPO trainers use and models ignore."""


def test_a_keyword_that_grpo_uses_and_the_model_ignores_is_reported(
    launcher: Launcher, saved: tiny.TinyModel, tmp_path: Path
) -> None:
    keyword = next((name for name, ranges in IGNORED.items() if stack.satisfied(ranges, INSTALLED)), None)
    if keyword is None:
        pytest.skip("the installed GRPO trainer and Transformers agree on the keyword")
    (rank,) = launcher(grpo, "upstream", saved, str(tmp_path), survive=True, strategy="single").values
    (text,) = (text for text in rank["odd"] if text.startswith("requested"))
    assert (
        f"requested from Qwen2ForCausalLM the logits of the last 6 positions by {keyword}=6, but it returned 20" in text
    )


@has_grpo
def test_the_callback_leaves_training_and_logs_as_they_are(
    launcher: Launcher, saved: tiny.TinyModel, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "logging_steps": 2, "save_strategy": "no"}
    logs = [
        launcher(grpo, "corrected", saved, str(tmp_path), watched, strategy="single", **settings).values[0]["log"]
        for watched in (False, True)
    ]
    alone = logs[0]
    together = [{key: entry[key] for key in entry if not key.startswith("memory/")} for entry in logs[1]]
    assert [entry["step"] for entry in alone if "loss" in entry] == [2, 4]
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        same = [key for key in one if not any(word in key for word in ("time", "runtime", "per_second"))]
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
    memory = [entry for entry in logs[1] if "memory/host_bytes" in entry]
    assert [entry["step"] for entry in memory] == [2, 4]
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
def test_ppo_saved_with_empty_tensors_under_zero3_is_reported(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher(ppo, str(tmp_path), False, strategy="zero3").values
    assert ranks[0]["right"]["tensors"] == TENSORS
    for rank in ranks:
        assert f"empty: {TENSORS} (" in rank["trap"]
        assert "model.embed_tokens.weight (0,) instead of (64, 32)" in rank["trap"]


def references(folder: str) -> dict[str, Any]:
    """What the check says of a reference model that is whole, one unit, and wrapped by layer; and the callback."""
    from accelerate import PartialState

    from pytest_trlcompat.checks import CompatCallback

    from .checks_bodies import build

    trainer = build(folder, max_steps=1, save_strategy="no")
    trainer.ref_model = MODEL.new_model().eval().to(PartialState().device)
    callback = CompatCallback(trainer, on_failure="raise", checks=["reference"])
    trainer.add_callback(callback)
    trainer.train()  # goes on to its end
    policy, device = trainer.model_wrapped, PartialState().device

    def said(reference: Any) -> tuple[str, str]:
        from pytest_trlcompat.checks import CheckError, check_reference_model

        try:
            return "passed", str(check_reference_model(reference, policy))
        except CheckError as error:
            return type(error).__name__, str(error)

    found: dict[str, Any] = {
        "whole": said(MODEL.new_model().eval().to(device)),
        "elsewhere": said(MODEL.new_model().eval()),
    }
    found["one unit"] = said(one_unit(policy, MODEL.new_model().eval().to(device)))
    found["by layer"] = said(policy.eval())
    found["outcome"] = [(each.check, each.error, each.odd) for each in callback.outcomes]
    trainer.ref_model = one_unit(policy, MODEL.new_model().eval().to(device))
    again = CompatCallback(trainer, on_failure="raise", checks=["reference"])
    again.on_train_begin(trainer.args, trainer.state, trainer.control)
    found["outcome of one unit"] = [(each.check, each.error, each.odd) for each in again.outcomes]
    return found


def one_unit(policy: Any, reference: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(policy, FullyShardedDataParallel):
        return FullyShardedDataParallel(reference)
    from torch.distributed.fsdp import fully_shard

    return fully_shard(reference)


@pytest.mark.parametrize(
    ("reference", "policy", "too_much"),
    [(1.0, 0.7, True), (1.0, 1.0, False), (0.9, 0.7, False), (0.3, 0.1, True), (None, 0.1, False), (1.0, None, False)],
)
def test_a_reference_model_gathered_whole_is_too_much_beside_a_policy_of_few_layers(
    reference: float | None, policy: float | None, too_much: bool
) -> None:
    from pytest_trlcompat.checks.reference import _gathers_too_much

    assert _gathers_too_much({"gathered": reference, "policy_gathered": policy}) is too_much


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_what_a_reference_model_costs_is_reported_with_numbers_and_ends_nothing(
    launcher: Launcher, strategy: str, tmp_path: Path
) -> None:
    ranks = launcher(references, str(tmp_path), strategy=strategy, options=options(strategy)).values
    size = sum(each.numel() for each in MODEL.model.parameters())
    layer = sum(each.numel() for each in MODEL.model.model.layers[0].parameters())
    share = max(layer, size - 2 * layer) / size
    for rank in ranks:
        kind, text = rank["one unit"]
        assert kind == "OddError"
        assert f"a forward gathers 100% of the reference model at once, of the policy {share:.0%}: wrap it" in text
        assert rank["outcome of one unit"] == [("reference", None, text)]
        assert rank["by layer"][0] == "passed", rank["by layer"]
        kind, text = rank["whole"]
        assert kind == "OddError"
        assert f"sharding: none instead of {'fsdp1 FULL_SHARD' if strategy == 'fsdp1' else 'fsdp2'}; every rank" in text
        assert f"every rank holds all of it, {4 * size / 2**20:.1f} MiB, which is right and costs memory" in text
        assert "GRPO" not in text
        assert rank["elsewhere"][0] == "CheckError"
        assert "devices: cpu instead of npu:" in rank["elsewhere"][1]
        ((check, error, odd),) = rank["outcome"]
        assert (check, error) == ("reference", None)
        assert odd == text
