"""Cure of ``transformers-decayed-norms``: weight decay that leaves norms out, as its documentation says.

Trainer leaves biases and layer norms without weight decay. Older releases of Transformers know a layer norm by its
class, ``torch.nn.LayerNorm``, which the RMS norms of most models are not: their weights shrink. The cure leaves out the
parameters whose names say that they are a norm's, as newer releases do.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint, replaced
from pytest_trlcompat.trainers.curing.upstream import definitions

__all__ = ["DecayedNormsMixin"]

PARAMETER_NAMES = PatchPoint("transformers.trainer:get_parameter_names", "<4.53")  # asked for norms' names from then on

_NORM = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""What Transformers looks for in lower-case names from 4.53 on."""
_NORMS = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.self_attn.q_norm")
_FLAT = "_flat_param"
"""The name that FSDP1 gives what it has made of all parameters of a unit."""


class DecayedNormsMixin(Cure):
    """Leaves the norms of any ``transformers.Trainer``'s model without weight decay.

    It changes what Transformers' own ``get_decay_parameter_names`` finds, and that only where the real call asks for
    classes alone, or for names that miss a norm's. What a user's method adds or leaves out stays. With ``weight_decay``
    a training that began without the cure has other groups of parameters, as one has with newer Transformers: torch
    refuses to load its optimizer from a checkpoint.
    """

    _kinds: ClassVar = {
        "trainer": ("EmptyParamGroupsMixin", "neither calls the other; it was measured here"),
        "grpo": ("EmptyParamGroupsMixin", "neither calls the other; it was measured here"),
        "ppo": ("EmptyParamGroupsMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.trainer_method("get_decay_parameter_names"), PARAMETER_NAMES)
    args: Any
    _left_out: int | None = None

    def get_decay_parameter_names(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        if not self.args.weight_decay:
            return upstream.get_decay_parameter_names(*args, **kwargs)
        with replaced(PARAMETER_NAMES, self._but_norms, DecayedNormsMixin.__name__):
            names = upstream.get_decay_parameter_names(*args, **kwargs)
        if self._left_out is not None and any(name.rpartition(".")[2] == _FLAT for name in names):
            logging.getLogger(__name__).warning(
                "DecayedNormsMixin: FSDP1 with use_orig_params=False has made one parameter of norms and weights, "
                "which decays as a whole"
            )
        return names

    def _but_norms(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        def get_parameter_names(*args: Any, **kwargs: Any) -> Any:
            names = upstream(*args, **kwargs)
            # The parameters are (model, forbidden_layer_types, forbidden_layer_names=None).
            asked = args[2] if len(args) > 2 else kwargs.get("forbidden_layer_names")
            if _names_norms(asked or ()):
                return names
            decaying = [name for name in names if not _NORM.search(name.lower())]
            self._left_out = len(names) - len(decaying)
            return decaying

        return get_parameter_names

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        method = next(
            (defined for who, defined, _ in definitions(trainer_class, _METHOD) if who == "transformers"), None
        )
        if method is None:
            return Activity(False, "the trainer's own class says what decays")
        if trainer is not None and not trainer.args.weight_decay:
            return Activity(False, "weight_decay is 0")
        if trainer is not None and trainer._left_out is not None:
            return Activity(bool(trainer._left_out), f"{trainer._left_out} parameters of norms do not decay")
        decayed = _norms_that_decay(method)
        if decayed is None:
            return Activity(None, "seen when the optimizer is made")
        if not decayed:
            return Activity(False, "Transformers leaves norms out by their names")
        if trainer is None:
            return Activity(None, "with weight_decay: Transformers knows norms by their class alone")
        return Activity(True, "Transformers knows norms by their class alone")


_METHOD = "get_decay_parameter_names"


def _names_norms(patterns: Sequence[str]) -> bool:
    """Whether each kind of norm is named by one of the patterns that Transformers itself leaves out."""
    return all(any(re.search(pattern, name) for pattern in patterns) for name in _NORMS)


def _norms_that_decay(method: Callable[..., Any]) -> int | None:
    """How many norms of another class than LayerNorm's Transformers' method has decay; ``None`` if it needs a trainer.

    Asked of a model of one norm of each kind.
    """
    import torch

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

    model = torch.nn.Module()
    for name in _NORMS:
        model.add_module(name.rpartition(".")[2], Norm())
    try:
        return len(method(None, model))
    except AttributeError:
        return None
