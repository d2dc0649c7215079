"""Cure of ``dpo-liger-settings``, ``grpo-liger-experts`` and ``sft-liger-completions``: what is left out with Liger.

All of it without an error.

Liger's loss of DPO has a beta and a type, and knows no weights of pairs, no other divergence and no desensitisation to
length; that of GRPO is computed beside the model's own forward pass, which alone balances the use of experts. SFT drops
the column of the dataset that says which tokens are of a completion. No cure can add what Liger does not compute, and
none rewrites a dataset, so such a trainer is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing.conditions import LIGER, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure, is_ours

__all__ = ["LigerSettingsMixin"]


class LigerSettingsMixin(Cure):
    """Refuses a trainer with Liger's loss, and with a setting that this loss leaves out.

    Raises:
        ValueError: when it is built; names the settings.
    """

    _kinds: ClassVar = {
        "trainer": ("KTOEvaluationMixin", "neither calls the other; it was measured here"),
        "grpo": ("TokenNormalizerMixin", "neither calls the other; cures of one topic stand together"),
    }
    _needed: ClassVar = (LIGER,)
    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        left_out = [*(_left_out(self) if LIGER.holds(self) else ()), *_dropped_masks(self, args, kwargs)]
        if left_out:
            raise ValueError(
                f"With Liger {', '.join(left_out)} would be left out, and TRL does not say so. "
                f"Train without {LIGER.where.removeprefix('with ')}, or without these settings."
            )

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "a setting that Liger's loss leaves out is refused", LIGER)


def _given_dataset(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a trainer was given to train on, by name or by place."""
    if "train_dataset" in kwargs:
        return kwargs["train_dataset"]
    build = next(vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base) and not is_ours(base))
    return inspect.signature(build).bind_partial(None, *args, **kwargs).arguments.get("train_dataset")


def _dropped_masks(trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Which tokens count, where the given dataset says so and the trainer's own no longer does."""
    if not getattr(trainer.args, "use_liger_kernel", False) or not hasattr(trainer.args, "completion_only_loss"):
        return
    before, after = _columns(_given_dataset(type(trainer), args, kwargs)), _columns(trainer.train_dataset)
    # None, the default, means True where the dataset has completions.
    has_completions = {"completion", "completion_mask"} & before and trainer.args.completion_only_loss is not False
    if has_completions and "input_ids" in after and not {"completion_mask", "labels"} & after:
        yield "that completions alone are trained on"


def _columns(data: Any) -> set[str]:
    """Of a dataset, as far as it names them."""
    names = getattr(data, "column_names", None)
    return set(names) if isinstance(names, list) else set()


def _left_out(trainer: Any) -> Iterator[str]:
    args = trainer.args
    if getattr(args, "use_weighting", False):
        yield "use_weighting=True"
    alpha: Any = getattr(args, "ld_alpha", None)
    if alpha is not None and alpha != 1.0:
        yield f"ld_alpha={alpha}"
    divergence = getattr(args, "f_divergence_type", "reverse_kl")
    if (divergence := str(getattr(divergence, "value", divergence))) != "reverse_kl":
        yield f"f_divergence_type={divergence!r}"
    types = getattr(args, "loss_type", "")
    smoothing: Any = getattr(args, "label_smoothing", 0.0)
    if "robust" in (types if isinstance(types, list) else [types]) and smoothing:
        yield f"label_smoothing={smoothing} of loss_type='robust'"
    if getattr(trainer, "aux_loss_enabled", False):
        yield "the auxiliary loss that balances experts (router_aux_loss_coef)"
