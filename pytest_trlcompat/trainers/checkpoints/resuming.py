"""Cure of ``transformers-resume``: random states of a checkpoint that torch refuses to load.

By default a newer ``torch.load`` loads tensors alone, and an older Transformers does not allow it anything else: a
training that is resumed ends with ``Weights only load failed`` at the random state of numpy. The cure allows that.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["ResumingMixin", "random_states_can_be_loaded"]


def random_states_can_be_loaded() -> contextlib.AbstractContextManager[None]:
    """A context in which ``torch.load`` takes numpy's random state as well: an array, and no code of the file.

    Does nothing where torch loads everything, or Transformers sees to it itself.
    """
    if _needless():
        return contextlib.nullcontext()
    import numpy as np
    import torch

    # What Transformers allows from 4.47 on. The function is asked of an array, since NumPy 2 has moved its module.
    reconstruct = np.empty(0).__reduce__()[0]
    context: contextlib.AbstractContextManager[None] = torch.serialization.safe_globals(
        [reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    )
    return context


def _needless() -> str:
    """Why they can be loaded anyway; empty where they cannot."""
    import torch
    import transformers.trainer

    if not hasattr(torch.serialization, "safe_globals"):  # since torch 2.5
        return "torch loads everything"
    return "Transformers allows it itself" if hasattr(transformers.trainer, "safe_globals") else ""


class ResumingMixin(Cure):
    """Lets a subclass of ``transformers.Trainer`` go on from a checkpoint.

    It knows by ``safe_globals`` in Transformers whether that allows it itself. Resuming sets the random states of
    Python, numpy, torch and the accelerator.
    """

    _kinds: ClassVar = {
        "trainer": ("EvaluationRemainderMixin", "neither calls the other; it was measured here"),
        "grpo": ("EvaluationRemainderMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.trainer_method("_load_rng_state"),)

    def _load_rng_state(self, checkpoint: Any) -> None:
        upstream: Any = super()
        with random_states_can_be_loaded():
            upstream._load_rng_state(checkpoint)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if reason := _needless():
            return Activity(False, reason)
        return Activity(True, "Transformers does not allow torch to load random states of numpy")
