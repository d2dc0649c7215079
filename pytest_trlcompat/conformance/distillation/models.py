"""Students and teachers of a distillation, and adapters, by the axes of a setting.

Runs inside a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.architectures import ARCHITECTURES, architecture
from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.supervised.preferences import with_dropout

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTERS", "TEACHERS", "adapter_config", "teacher", "untrained"]

TEACHERS = (
    *("", "bfloat16", "name", "name_in_config", "dropout", "experts", "other_vocabulary", "none"),
    *ARCHITECTURES,
)
"""``""``: a model of other sizes than the student's; ``name``: its folder; ``name_in_config``: its folder, given only
by ``teacher_model_name_or_path``; ``dropout``: its config asks for dropout, and it is in training mode."""
ADAPTERS = ("", "peft_config", "peft_model", "both", "mapping", "head", "saved_head", "prompt")
"""Adapters of other trainers, and ``head``: LoRA of the output head; ``saved_head``: the output head itself is trained;
``prompt``: trained tokens in front of the prompt."""


def teacher(model: TinyModel, setting: Mapping[str, Any], whole: bool = False) -> Any:
    """The argument ``teacher_model``: a model, its folder, or ``None``."""
    kind = setting.get("teacher", "")
    other = teacher_of(model)
    if kind in ("none", "name_in_config") and not whole:
        return None
    if kind in ARCHITECTURES:
        return architecture(kind, model)
    if kind == "other_vocabulary":
        other = dataclasses.replace(other, vocab_size=model.vocab_size + 8)
    chosen = {"name_in_config": "name"}.get(kind, kind)
    teacher_model = objects.policy(other, {"model": chosen}, whole)
    if kind == "dropout" and not whole:
        teacher_model = with_dropout(teacher_model, None, {"dropout": "attention"}).train()
    return teacher_model


def teacher_of(model: TinyModel) -> TinyModel:
    """The teacher: half as wide as the student, with other weights."""
    return dataclasses.replace(model, hidden_size=model.hidden_size // 2, seed=model.seed + 1)


def untrained(model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Student and teacher as a trainer has them before training, adapters included; in evaluation mode."""
    student, adapter = objects.policy(model, setting, whole=True), adapter_config(setting)
    if adapter is not None:
        from peft import get_peft_model

        student = get_peft_model(student, adapter)
        objects.fill_adapter(student)
    taught = teacher(model, setting, whole=True)
    if setting.get("teacher_model_init_kwargs", {}).get("dtype"):
        import torch

        taught = taught.to(getattr(torch, setting["teacher_model_init_kwargs"]["dtype"]))
    return student.eval(), taught.eval()


def adapter_config(setting: Mapping[str, Any]) -> Any:
    """What is passed as ``peft_config``, or ``None``."""
    kind = setting.get("adapter")
    if kind not in ("head", "prompt"):
        return objects.adapter_config(setting)
    import peft

    if kind == "prompt":
        return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    config = objects.adapter_config({"adapter": "peft_config"})
    config.target_modules = {"q_proj", "lm_head"}
    return config
