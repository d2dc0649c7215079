"""Cure of ``distillation-fsdp-teacher``: a teacher model that is where the policy is, under FSDP.

TRL prepares the teacher by Accelerate's ``prepare_model(evaluation_mode=True)``, which under FSDP neither shards a
model nor places it: it stays on the CPU of every rank, and its first forward fails with ``Expected all tensors to be on
the same device``.

Under FSDP2 the cure shards it like the policy, as is right for a reference model; TRL gathers the weights of its output
head, which it uses beside the forward pass, itself. Under FSDP1 nothing can gather them there, and the teacher is whole
on every rank, as under DDP. Each rank gets the weights of rank 0.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import torch
from torch import nn

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import FSDP, Condition, fsdp_version, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.fsdp.fsdp_ref_model import forget, is_sharded, shard_reference_model, share_parameters

__all__ = ["FSDPTeacherMixin"]


class FSDPTeacherMixin(Cure):
    """Places the teacher of any trainer that keeps one as ``teacher_model``, under FSDP1 and FSDP2.

    Does nothing with one that is sharded, or on another device than the CPU, since somebody has placed it; or that is
    the policy itself, as where a model is its own teacher.
    """

    # GRPO has no teacher.
    _kinds: ClassVar = {
        "trainer": ("FSDPReferenceModelMixin", "its __init__ calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.PREPARE_FSDP2,)
    _needed: ClassVar = (
        FSDP,
        Condition(
            "with a teacher of its own on the CPU",
            "there is no teacher beside the policy, or it has been placed",
            lambda trainer: _is_left(getattr(trainer, "teacher_model", None), trainer),
        ),
    )
    accelerator: Any
    teacher_model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._teacher_placed = False
        if FSDPTeacherMixin._activity(type(self), self).active:
            self.teacher_model = _placed(self.teacher_model, self.accelerator)
            # Once placed, it does not meet the condition any more by which `_activity` answers.
            self._teacher_placed = True

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if getattr(trainer, "_teacher_placed", False):
            return Activity(True, _WHY)
        return under(trainer, _WHY, *cls._needed)


_WHY = "it is sharded like the policy under FSDP2, and whole on each rank's device under FSDP1"


def _is_left(teacher: Any, trainer: Any) -> bool:
    """Whether a model has nothing of the policy, and is whole and on the CPU, where ranks have other devices."""
    if not isinstance(teacher, nn.Module) or is_sharded(teacher) or trainer.accelerator.device.type == "cpu":
        return False
    if share_parameters(teacher, trainer.model):
        return False
    return all(parameter.device.type == "cpu" for parameter in teacher.parameters())


def _placed(teacher: nn.Module, accelerator: Any) -> nn.Module:
    if fsdp_version(accelerator) == 2:
        return shard_reference_model(teacher, accelerator)
    forget(accelerator, teacher)
    teacher.requires_grad_(False)
    teacher.to(accelerator.device)
    for tensor in itertools.chain(teacher.parameters(), teacher.buffers()):
        # With cpu_ram_efficient_loading rank 0 alone has the weights.
        torch.distributed.broadcast(tensor.data, src=0)
    return teacher.eval()
