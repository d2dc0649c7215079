"""Cure of ``fsdp2-grad-norm``: under FSDP2 the norm of all gradients is logged, not of a rank's part.

``torch.nn.utils.clip_grad_norm_`` clips by the norm of all gradients, but what it returns may be a ``DTensor`` of which
each rank holds its own part's norm. ``Trainer`` takes ``.item()`` of it, which is that part: with N ranks ``grad_norm``
is too small by about the square root of N, and differs from rank to rank. Weights are right. The cure reduces it.

Imports only the standard library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from pytest_trlcompat.trainers._conditions import FSDP2, under
from pytest_trlcompat.trainers._cure import Activity, Cure

__all__ = ["FSDP2GradNormMixin", "whole_norm"]


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

    _needed: ClassVar = (FSDP2,)
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        upstream: Any = super()
        upstream.create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = _returning_whole_norms(self.accelerator.clip_grad_norm_)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "torch may return the norm of a rank's part", *cls._needed)


def _returning_whole_norms(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        return whole_norm(clip(*args, **kwargs))

    return clip_grad_norm_
