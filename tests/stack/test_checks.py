"""Checks on real trainings under each strategy: each passes where nothing is wrong, and says what is where it is.

Failing cases are known bugs of the installed releases where these have them, else faults planted into a training. TRL's
own trainers are test_checks_trl.py's matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher

from .checks_bodies import (
    ADAPTED,
    ADAPTER,
    INSTALLED,
    MODEL,
    STRATEGIES,
    TENSORS,
    build,
    check_text,
    failure,
    options,
    trained,
    watch,
)

pytest.importorskip("trl")


# ---- a training in which nothing is wrong


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_right_training_passes_every_check(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
    ranks = trained(launcher, strategy, tmp_path)
    for rank in ranks:
        assert rank["checked"] == [
            ("trainable", 0),
            *([] if strategy == "single" else [("ranks", 0)]),
            ("logits", 0),
            ("gradients", 0),
            ("moved", 1),
            ("forward", 1),
            ("checkpoint", 2),
        ]
        assert rank["errors"] == rank["odd"] == []
        if strategy in ("ddp", "zero2"):
            assert rank["found"]["ranks"] == {"compared": TENSORS, "alone": 0}
        assert rank["found"]["trainable"] == {"trainable": TENSORS, "frozen": 0, "lora": 0}
        assert rank["found"]["logits"] == 0  # a plain trainer asks for all logits
        assert len(rank["found"]["gradients"]["reached"]) == TENSORS
        assert rank["found"]["moved"] == {"moved": TENSORS, "frozen": 0}
        assert [entry["step"] for entry in rank["log"] if "loss" in entry] == [1, 2]
    saved = ranks[0]["found"]["checkpoint"]
    assert saved["tensors"] == TENSORS
    assert saved["bytes"] == sum(4 * each.numel() for each in MODEL.model.parameters())
    assert {rank["found"]["checkpoint"]["tensors"] for rank in ranks[1:]} <= {0}


@pytest.mark.parametrize("strategy", ["zero3", "fsdp1", "fsdp2"])
def test_tied_weights_need_to_be_saved_once(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
    ranks = trained(launcher, strategy, tmp_path, tied=True)
    assert [rank["errors"] + rank["odd"] for rank in ranks] == [[], []]
    assert ranks[0]["found"]["trainable"]["trainable"] == TENSORS - 1
    assert ranks[0]["found"]["checkpoint"]["tensors"] in (TENSORS - 1, TENSORS)  # releases differ


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
    assert [rank["odd"] for rank in ranks] == [[]] * len(ranks)


# ---- trainings in which something is


ADAPTERS_CAN_MISS_GRADIENTS = stack.satisfied({"transformers": "<5"}, INSTALLED)


def train_without_input_gradients(folder: str) -> dict[str, Any]:
    """trl 3150 where it is silent: the output head is adapted as well, so that backward finds something to do."""
    trainer = build(folder, lora={"target_modules": ["q_proj", "v_proj", "lm_head"]})
    base = trainer.model.get_base_model()
    if ADAPTERS_CAN_MISS_GRADIENTS:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    else:
        base.model.norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),))
    return watch(trainer, on_failure="warn", checks=["gradients", "moved"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_that_no_gradient_reaches_are_named(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
    body = train_without_input_gradients
    for rank in launcher(body, str(tmp_path), strategy=strategy, options=options(strategy)).values:
        (text,) = rank["odd"]
        assert text.startswith(f"expected a gradient for each of the {2 * ADAPTED + 2} trainable parameters, but")
        assert (
            f"came to {2 * ADAPTED} (base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight, " in text
        )
        assert "lm_head" not in text
        assert "call model.enable_input_require_grads() or use_reentrant=False" in text
        # Where gradients are sharded, one that never came looks like zeros, which a new adapter may have for one step.
        assert ("gradients", 0 if "none came to" in text else 1) in rank["checked"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_are_not_finite_are_named(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
    checks = {"checks": ["gradients"], "on_failure": "warn"}
    for rank in trained(launcher, strategy, tmp_path, factor=float("nan"), checks=checks, save_strategy="no"):
        (text,) = rank["errors"] + rank["odd"]
        assert (
            f"expected a gradient for each of the {TENSORS} trainable parameters, but NaN or infinity came to" in text
        )
        assert "model.embed_tokens.weight" in text
        if rank["odd"]:
            assert strategy.startswith("zero")  # DeepSpeed skips such a step in every precision
            assert text.endswith("weights are finite, so the step was skipped")
        else:
            assert f"expected finite weights after a step, but NaN or infinity is in {TENSORS} (" in text


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
        assert rank["odd"] == ranks[0]["odd"]
        (moved,) = (text for text in rank["odd"] if text.startswith("expected a step to change"))
        assert "the frozen parameters 1 (base_model.model.model.layers.1.mlp.up_proj.weight) changed" in moved
        if left_out:
            assert f"it lacks 2 ({query}.lora_A.default.weight, {query}.lora_B.default.weight)" in rank["odd"][0]
            assert f"1 ({query}.lora_B.default.weight) had a gradient and did not change" in moved


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_that_would_reload_differently_is_named(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
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
        assert "they cannot be read: SafetensorError" in said["cut"]


def memory_of_one_rank(folder: str) -> dict[str, Any]:
    """The second rank alone goes beyond the limit."""
    import torch

    trainer = build(folder, save_strategy="no")
    if trainer.accelerator.process_index == 1:
        torch.empty(64 << 20, dtype=torch.uint8, device=trainer.accelerator.device)
    return watch(trainer, accelerator_limit=32 << 20)


def test_ranks_take_one_decision(launcher: Launcher, tmp_path: Path) -> None:
    text = failure(launcher, memory_of_one_rank, str(tmp_path), strategy="ddp")
    assert text.startswith("rank 1 of 2: expected memory within its limits, but the accelerator's peak is 67")
    assert text.endswith(" of 33554432 bytes (32 MiB) allowed")


def fail_unexpectedly_on_one_rank() -> None:
    from accelerate import PartialState

    from pytest_trlcompat.checks._ranks import together

    rank = PartialState().process_index
    with together("something"):
        if rank == 1:
            raise KeyError("lost")


def test_a_check_that_itself_fails_on_one_rank_fails_on_all(launcher: Launcher) -> None:
    text = failure(launcher, fail_unexpectedly_on_one_rank, strategy="ddp", sharded=False, kind="OddError")
    assert text == "rank 1 of 2: something could not be checked: KeyError: 'lost'"


# ---- logits


def ask_for_logits(folder: str) -> dict[str, Any]:
    """What the check reports in a training: of the model as it is, with a keyword that it ignores, and modified."""
    from pytest_trlcompat.checks import check_logits
    from pytest_trlcompat.checks._models import unwrapped
    from pytest_trlcompat.trainers.logprobs.logits_to_keep import KEYWORDS, logits_keyword

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
def test_too_many_or_wrong_logits_are_reported(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
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
            elif stack.satisfied({"transformers": "<4.46"}, INSTALLED):  # refused, which is better than ignored
                assert text.startswith(
                    f"called Qwen2ForCausalLM with {keyword}=5, but: Qwen2ForCausalLM.forward() got an"
                )
            else:
                assert text.startswith("requested from Qwen2ForCausalLM the logits of the last 5 positions by")
                assert f"{keyword}=5, but it returned 9: it ignores the keyword" in text
        assert "log-probabilities computed from the 5 logits that Qwen2ForCausalLM returns for" in said["first"]
        assert "Do they belong to other positions?" in said["first"]


# ---- what the callback puts off, and its arguments


def test_gradients_that_stay_zero_are_reported_after_some_steps(launcher: Launcher, tmp_path: Path) -> None:
    (rank,) = trained(launcher, "single", tmp_path, factor=0.0, checks={"patience": 2}, max_steps=4, save_strategy="no")
    (text,) = rank["odd"]
    assert f"nothing but zeros came to {TENSORS} (model.embed_tokens.weight" in text
    assert "in 2 steps" in text
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

    with pytest.raises(ValueError, match="unknown checks logit; known are trainable, reference, ranks, logits, "):
        CompatCallback(None, checks=["logit"])
    with pytest.raises(ValueError, match="on_failure='ignore' is neither 'raise' nor 'warn'"):
        CompatCallback(None, on_failure="ignore")


# ---- what a folder may hold


def save(model: Any, folder: Path, how: str) -> None:
    """Save a model as releases old and new, and users, do."""
    import json

    import torch

    tensors = dict(model.state_dict())
    names = sorted(tensors)
    if how == "whole":
        model.save_pretrained(folder)
    elif how == "shards":
        model.save_pretrained(folder, max_shard_size="20KB")
    elif how == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif how == "bin of torch before 1.6":
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    elif how == "shards of bin":
        files = {name: f"pytorch_model-{index % 2}.bin" for index, name in enumerate(names)}
        for file in set(files.values()):
            torch.save({name: tensors[name] for name in names if files[name] == file}, folder / file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("how", ["whole", "shards", "bin", "bin of torch before 1.6", "shards of bin"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_format_is_read_and_a_difference_in_it_found(tmp_path: Path, how: str, tied: bool) -> None:
    import torch

    from pytest_trlcompat.checks import check_checkpoint

    model = tiny.qwen2(tie_word_embeddings=tied).new_model()
    save(model, tmp_path, how)
    leaves_out = tied and how in ("whole", "shards")
    assert check_checkpoint(tmp_path, model)["tensors"] == TENSORS - leaves_out
    with torch.no_grad():
        model.model.norm.weight[3] += 0.5
    assert "different: 1 (model.norm.weight (by 0.5 at most))." in check_text(check_checkpoint, tmp_path, model)


def test_a_copy_in_another_type_is_compared_on_demand(tmp_path: Path) -> None:
    from pytest_trlcompat.checks import check_checkpoint

    model = MODEL.new_model()
    MODEL.new_model().bfloat16().save_pretrained(tmp_path)
    assert f"different: {TENSORS} (" in check_text(check_checkpoint, tmp_path, model)
    assert check_checkpoint(tmp_path, model, cast=True)["bytes"] == 2 * sum(each.numel() for each in model.parameters())


def test_folders_without_weights_are_reported(tmp_path: Path) -> None:
    from pytest_trlcompat.checks import check_checkpoint

    model = MODEL.new_model()
    missing = check_text(check_checkpoint, tmp_path / "nowhere", model)
    assert missing == f"expected a checkpoint in {tmp_path / 'nowhere'}, but there is no such folder"
    (tmp_path / "config.json").write_text("{}")
    text = check_text(check_checkpoint, tmp_path, model)
    assert "it contains none that can be loaded as a whole; it holds config.json. Under FSDP" in text


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_pickles_that_run_code_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from pytest_trlcompat.checks import check_checkpoint

    torch.save({"model.norm.weight": Evil()}, tmp_path / "pytorch_model.bin")
    assert "they cannot be read: UnpicklingError" in check_text(check_checkpoint, tmp_path, MODEL.new_model())
    assert "executed" not in capsys.readouterr().out
