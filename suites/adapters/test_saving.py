"""Whether an adapter that was trained on several ranks is saved, and training resumed from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import adapter_saving, reward
from ..measured import every
from ..sharding.trainings import greatest_difference, read_safetensors
from ..verdicts import failure_of

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache
    from .trainings import AdapterTrainings

FILE = "adapter_model.safetensors"
REWARD_TOLERANCE = 1e-5
"""Absolute, of rewards of about 0.1: a head that is drawn anew changes them by as much as they are."""


@pytest.mark.known_issue("lora-fsdp-save")
def test_saving_under_fsdp1(subject: str, judge: Judge, adapter_trainings: AdapterTrainings) -> None:
    """Adapters that FSDP1 shards are saved empty, and not resumed.

    Right is: ``save_model`` leaves a file from which another process reads the adapter, bitwise, and a training that
    was resumed from its checkpoint ends with the same adapter as one that was not interrupted.
    """

    def measure() -> Finding:
        training = adapter_trainings(subject, "fsdp1")
        run, folder = training.first, training.folder
        failures = training.failures()
        if failures.first:
            failure = next(iter(failures.first.values()))
            return Finding(Verdict.ERROR, {"failure": failure, **failures.of_other_ranks})
        adapter, saved = run["adapter"], read_safetensors(folder / adapter_saving.SAVED, FILE)
        checkpoint = read_safetensors(folder / f"checkpoint-{adapter_saving.STEPS}", FILE)
        evidence = {
            "tensors": len(adapter),
            "tensors_saved": len(saved),
            "tensors_in_checkpoint": len(checkpoint),
            "bitwise_equal": sum(saved.get(name) == data for name, data in adapter.items()),
            "grad_norm": run["grad_norm"],
            "grad_norm_resumed": run["grad_norm_resumed"],
            "resumed_off_by": greatest_difference(run["resumed"], adapter),
        }
        assert len(adapter) > 0
        right = saved == checkpoint == adapter == run["resumed"]
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="fsdp1")


@pytest.mark.known_issue("peft-distributed-load")
def test_resuming_under_ddp(subject: str, judge: Judge, adapter_trainings: AdapterTrainings) -> None:
    """Ranks cannot load adapters, so training cannot be resumed (peft 3628).

    Right is: a training that was resumed from its checkpoint ends with the same adapter as one that was not
    interrupted.
    """

    def measure() -> Finding:
        training = adapter_trainings(subject, "ddp")
        run, failures = training.first, training.failures("training", "resuming")
        if failed := failure_of(judge.issue.id, failures.first):
            return Finding(failed, {"failures": failures.first, **failures.of_other_ranks})
        evidence = {
            "tensors": len(run["adapter"]),
            "grad_norm": run["grad_norm"],
            "grad_norm_resumed": run["grad_norm_resumed"],
            "resumed_off_by": greatest_difference(run["resumed"], run["adapter"]),
        }
        right = run["resumed"] == run["adapter"] and evidence["tensors"] > 0
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="ddp")


@pytest.mark.known_issue("reward-adapter-head")
def test_reward_head(subject: str, judge: Judge, launches: LaunchCache, saved_qwen2: TinyModel) -> None:
    """The head of a reward model is neither trained nor saved with an adapter (trl 578, 1379).

    Right is: with LoRA by a ``peft_config`` that names no task, the head is trained, and whoever loads the adapter onto
    the model that it began with has the rewards of the trained model, each time.
    """

    def measure() -> Finding:
        (run,) = launches(reward.adapter_loaded, subject, saved_qwen2, strategy="single").values
        if run["failure"] is not None:
            return Finding(Verdict.ERROR, run)
        assert len(run["trained"]) > 1
        same = every(loaded == pytest.approx(run["trained"], abs=REWARD_TOLERANCE) for loaded in run["loaded"])
        return Finding(Verdict.OK if run["head_trained"] and same else Verdict.SILENT, run)

    judge(measure, subject=subject, strategy="single")
