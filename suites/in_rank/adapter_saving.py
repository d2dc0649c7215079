"""GRPO with adapters, measured inside the ranks: trained, saved, and resumed from a checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import weights

from . import adapters, grpo, grpo_trainings, models, sharding

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["SAVED", "STEPS", "train"]

STEPS = 2
SAVED = "saved"
"""Name of the folder that ``save_model`` is given."""


def train(subject: str, model: TinyModel, folder: str, resuming: bool) -> dict[str, Any]:
    """Train an adapter for two steps; with a checkpoint after the first, if another is to be resumed from there.

    Args:
        folder: for the checkpoints, and for what ``save_model`` writes, in :data:`SAVED`.
        resuming: whether to save, and to resume.

    Returns:
        ``failure`` and ``resuming`` are texts of what went wrong, or ``None``; ``adapter`` and ``resumed`` map the
        names of files of PEFT's to the bytes of whole float32 tensors, on rank 0 alone.
    """
    grpo_trainings.fix_completions(model.vocab_size)
    trainer = _build(subject, model, folder, resuming)
    if resuming:
        trainer.add_callback(grpo_trainings.saving_once())  # the other one saves its last step
    with sharding.failure() as training:
        trainer.train()
    measured: dict[str, Any] = {"failure": training.get("text"), "grad_norm": models.logged(trainer, "grad_norm")}
    if training:
        # A rank that leaves early takes its connections along.
        with sharding.failure():
            trainer.accelerator.wait_for_everyone()
        return measured
    if not resuming:
        return measured
    measured["adapter"] = _adapter(trainer)
    with sharding.failure() as saving:
        trainer.save_model(os.path.join(folder, SAVED))
    measured["saving"] = saving.get("text")
    again = _build(subject, model, folder, saving=True)
    with sharding.failure() as caught:
        again.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-1"))
    measured["resuming"] = caught.get("text")
    if not caught:
        measured["resumed"] = _adapter(again)
        measured["grad_norm_resumed"] = models.logged(again, "grad_norm")
    return measured


def _build(subject: str, model: TinyModel, folder: str, saving: bool) -> Any:
    from peft import LoraConfig

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = grpo.build_trainer(
        subject,
        model,
        arguments={"model": grpo.load_policy(model), "peft_config": config},
        max_steps=STEPS,
        max_completion_length=grpo_trainings.COMPLETION_LENGTH,
        output_dir=folder,
        save_strategy="steps" if saving else "no",
        save_steps=1,
    )
    adapters.fill_adapter(dict(trainer.model.named_parameters()))
    return trainer


def _adapter(trainer: Any) -> dict[str, bytes] | None:
    """The adapter's tensors under the names that PEFT saves them by; gathering them is collective."""
    whole = weights.whole(trainer.model_wrapped)
    adapter = {name.replace(".default", ""): tensor for name, tensor in whole.items() if "lora_" in name}
    return sharding.to_bytes(adapter) if trainer.is_world_process_zero() else None
