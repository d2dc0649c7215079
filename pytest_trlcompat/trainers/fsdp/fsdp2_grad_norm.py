"""Cure of ``fsdp2-grad-norm``: under FSDP2 the norm of all gradients is logged, not of a rank's part.

``torch.nn.utils.clip_grad_norm_`` clips by the norm of all gradients, but what it returns may be a ``DTensor`` of which
each rank holds its own part's norm. ``Trainer`` takes ``.item()`` of it, which is that part: with N ranks ``grad_norm``
is too small by about the square root of N, and differs from rank to rank. Weights are right. The cure reduces it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import FSDP2, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint, replaced

__all__ = ["FSDP2GradNormMixin", "whole_norm"]

CLIP = PatchPoint("accelerate.accelerator:Accelerator.clip_grad_norm_")


def whole_norm(norm: Any) -> Any:
    """A norm over all ranks: of a ``DTensor`` the reduced one, a tensor of no dimension; anything else as it is.

    Collective where the norm is a ``DTensor`` of which each rank holds a part; without communication elsewhere.
    """
    placements = getattr(norm, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return norm
    return norm.full_tensor()


class FSDP2GradNormMixin(Cure):
    """Lets any ``transformers.Trainer`` log the norm of all gradients under FSDP2.

    Does nothing where the accelerator's ``clip_grad_norm_`` returns the whole norm.
    """

    _kinds: ClassVar = {
        "trainer": ("FSDPTeacherMixin", "neither calls the other; cures of one topic stand together"),
        "grpo": ("FSDPGradientsMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.TRAIN, CLIP)
    _needed: ClassVar = (FSDP2,)
    accelerator: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with replaced(CLIP, self._whole, FSDP2GradNormMixin.__name__) if FSDP2.holds(self) else nullcontext():
            return super().train(*args, **kwargs)

    def _whole(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        # Nothing is kept by the accelerator, which may be copied.
        def clip_grad_norm_(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            norm = upstream(accelerator, *args, **kwargs)
            return whole_norm(norm) if accelerator is self.accelerator else norm

        return clip_grad_norm_

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "torch may return the norm of a rank's part", *cls._needed)
