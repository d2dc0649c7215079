"""What cures say of themselves, held against the catalogue: of a class, and of trainers that have really trained."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.catalog.remedies import mixins
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.cli import main
from pytest_trlcompat.launch import Launcher
from pytest_trlcompat.trainers.curing.cure import Cure
from pytest_trlcompat.trainers.curing.kinds import KINDS
from pytest_trlcompat.training.aliases import accepted, names_taken

pytest.importorskip("trl")

INSTALLED = stack.installed()
NEEDED = (Verdict.BROKEN, Verdict.SILENT, Verdict.WASTEFUL)
DEFAULT = Cure._activity(object, None).reason
ELSEWHERE = {"OneDevicePerRankMixin", *(name for name in KINDS["grpo"] if name.startswith("FSDP"))} - {
    "FSDP2GradNormMixin"
}
"""Mixins that may leave it at the default reason."""


ADAPTERS: dict[str, dict[str, Any]] = {
    "": {},
    "plain": {},
    "biases and head": {"bias": "lora_only", "modules_to_save": ["lm_head"]},
}
"""What else learns, by a name; empty for a training of all weights."""
NOT_MET = {
    "": {"deepspeed-empty-param-group"},  # norms and biases learn without weight decay
    "plain": {"lora-zero3-biases", "lora-zero3-whole-modules"},
    "biases and head": {"deepspeed-empty-param-group"},
}
"""Issues that such a training does not meet."""


def needed(strategy: str, adapter: str | None = None) -> Iterator[KnownIssue]:
    """Issues that GRPO has on the installed stack under a strategy, and that a training with this adapter meets.

    Args:
        adapter: a key of ``ADAPTERS``; by default any.
    """
    for issue in known_issues.load().values():
        met = adapter is None or ((adapter or not issue.needs) and issue.id not in NOT_MET[adapter])
        if issue.trainer in ("", "grpo") and mixins(issue, "grpo") and met:
            labels = issue.labels()
            found = (
                issue.predict("upstream", strategy, INSTALLED) if strategy in labels or not issue.strategies else None
            )
            if found is not None and found.verdict in NEEDED:
                yield issue


# ---- what runs in the ranks


def trained(model: tiny.TinyModel, folder: str, adapter: str) -> list[tuple[str, bool | None, str]]:

    import trl
    from transformers import AutoModelForCausalLM

    from pytest_trlcompat.trainers import GRPOTrainer

    settings: dict[str, Any] = {
        "output_dir": folder,
        "report_to": "none",
        "save_strategy": "no",
        "max_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_generations": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "mask_truncated_completions": True,
        "max_completion_length": 6,
        "temperature": 0.7,
        "beta": 0.1,
        "bf16": False,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    if not adapter and "sync_ref_model" in names_taken(trl.GRPOConfig):
        settings |= {"sync_ref_model": True, "ref_model_sync_steps": 1}
    more: dict[str, Any] = {}
    if adapter:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **ADAPTERS[adapter])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager"),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=trl.GRPOConfig(**accepted(trl.GRPOConfig, settings)),
        train_dataset=tiny.prompts(16, words=(2, 5)),
        eval_dataset=tiny.prompts(3, words=3),
        processing_class=model.tokenizer,
        **more,
    )
    trainer.train()
    assert trainer.state.global_step == 2
    return [(cure.name, cure.active, cure.reason) for cure in trainer.cures]


# ---- the tests


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_no_cure_that_the_catalogue_asks_for_says_of_the_class_that_it_does_nothing(strategy: str) -> None:
    from pytest_trlcompat.trainers import GRPOTrainer

    cures = {cure.name: cure for cure in GRPOTrainer.cures}
    assert list(cures) == list(KINDS["grpo"])
    assert all(cure.reason for cure in cures.values())
    assert {name for name, cure in cures.items() if cure.reason == DEFAULT} <= ELSEWHERE
    for issue in needed(strategy):
        assert any(cures[name].active is not False for name in mixins(issue, "grpo")), (issue.id, cures)


@pytest.mark.parametrize(
    ("strategy", "ranks", "adapter"),
    [
        ("single", 1, ""),
        ("single", 1, "plain"),
        ("zero3", 2, "plain"),
        ("zero3", 2, "biases and head"),
        ("fsdp1", 2, ""),
    ],
)
def test_what_cures_say_of_a_training_agrees_with_the_catalogue(
    launch: Launcher, tmp_path: Path, strategy: str, ranks: int, adapter: str
) -> None:
    from pytest_trlcompat.trainers import GRPOTrainer

    if adapter:
        pytest.importorskip("peft")
    model = tiny.qwen2(directory=tmp_path / "models", tie_word_embeddings=False)
    launched = launch(trained, model, str(tmp_path / "out"), adapter, strategy=strategy, world_size=ranks)
    of_class = {cure.name: cure for cure in GRPOTrainer.cures}
    for found in launched.values:
        active = {name: whether for name, whether, _ in found}
        reasons = {name: reason for name, _, reason in found}
        assert list(active) == list(KINDS["grpo"])
        for issue in needed(strategy, adapter):
            names = mixins(issue, "grpo")
            assert any(active[name] is not False for name in names), (issue.id, [reasons[name] for name in names])
        for name, whether in active.items():
            assert not (of_class[name].active is False and whether), (name, of_class[name].reason, reasons[name])
        if strategy != "zero3":
            for name in ("ZeRO3GenerationMixin", "ZeRO3WholeModulesMixin"):
                assert (active[name], reasons[name]) == (False, "not under ZeRO-3")
            assert active["DeepSpeedEvaluationMixin"] is False
        if strategy == "zero3":
            assert active["ZeRO3GenerationMixin"] is True
            assert active["ZeRO3WholeModulesMixin"] is (adapter != "plain")
        if not adapter and of_class["AdapterLoadingMixin"].active is not False:
            assert reasons["AdapterLoadingMixin"] == "no adapter is trained"
        assert active["EvaluationRemainderMixin"] is True
        assert reasons["EvaluationRemainderMixin"] == "Accelerate counts prompts for rows"


def test_the_program_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    from pytest_trlcompat.trainers import GRPOTrainer

    assert main(["cures", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["trainer"], document["kind"]) == ("trl.trainer.grpo_trainer:GRPOTrainer", "grpo")
    assert document["stack"]["trl"] == INSTALLED["trl"]
    listed = [(each["name"], each["active"], each["reason"]) for each in document["cures"]]
    assert listed == [(cure.name, cure.active, cure.reason) for cure in GRPOTrainer.cures]
    remainder = next(each for each in document["cures"] if each["name"] == "AdapterLoadingMixin")
    assert remainder["issues"] == ["peft-distributed-load"]
    assert remainder["upstream"] == ["https://github.com/huggingface/peft/issues/3628"]
    assert main(["cures", "trainer"]) == 0
    words = capsys.readouterr().out.split()
    assert words[0] == "transformers.trainer.Trainer"
    assert set(KINDS["trainer"]) <= set(words)
    assert "GradientAccumulationMixin" not in words


def test_the_program_names_a_trainer_of_ones_own_and_refuses_what_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cures", "trl:DPOTrainer", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], [each["name"] for each in document["cures"]]) == ("trainer", list(KINDS["trainer"]))
    for name, message in (
        ("trl:GRPOConfig", "trl:GRPOConfig is no subclass of transformers.Trainer"),
        ("trl:Nothing", f"trl {INSTALLED['trl']} has no Nothing"),
    ):
        assert main(["cures", name]) == 2
        out, err = capsys.readouterr()
        assert (out, err.startswith(f"trlcompat cures: {message}"), err.count("\n")) == ("", True, 1)


def test_what_deepspeed_logs_when_it_is_imported_is_no_part_of_the_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_trlcompat", "cures", "trainer", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "trainer"
