"""The axis ``liger`` of a setting: which part of Liger a training uses.

``loss``: TRL's trainer takes its loss from ``liger_kernel.chunked_loss``, which is plain PyTorch and uses no kernel.
``kernels``: everything that ``use_liger_kernel`` switches on, which includes kernels of the model's layers. They are
written in Triton; on the software accelerator Triton's interpreter runs them.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["AXIS", "DPO_LOSS", "GRPO_LOSS", "fields", "lacking", "uncompiled"]

AXIS = ("", "loss", "kernels")
GRPO_LOSS, DPO_LOSS = "trl>=0.17,<1.13", "trl>=0.19,<1.13"
"""Releases whose trainer takes its loss from Liger."""
_LAYERS = ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
"""What Liger replaces in a model of Qwen2's or Qwen3's kind."""


def fields(setting: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The config's fields for the setting's value of the axis.

    Args:
        known: the fields that the release's config has.
    """
    part = setting.get("liger")
    if not part:
        return {}
    if part == "kernels":
        return {"use_liger_kernel": True}
    if "use_liger_loss" in known:  # until 0.27; then one field means both
        return {"use_liger_loss": True}
    return {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(_LAYERS, False)}


def lacking(setting: Mapping[str, Any]) -> str:
    """That Liger is not installed, where the setting needs it; else empty."""
    if setting.get("liger") and importlib.util.find_spec("liger_kernel") is None:
        return "Liger is not installed; cells that have it are run by: nox -s matrix -- --liger"
    return ""


def uncompiled(setting: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """A context in which Liger's losses run uncompiled: the software accelerator cannot compile them."""
    if not setting.get("liger"):
        return contextlib.nullcontext()
    from torch.compiler import set_stance

    stance: contextlib.AbstractContextManager[None] = set_stance("force_eager")
    return stance
