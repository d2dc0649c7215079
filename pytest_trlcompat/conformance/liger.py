"""The axis ``liger`` of a setting: which of Liger's parts a training uses.

``loss``: TRL's trainer takes its loss from ``liger_kernel.chunked_loss``, which is plain PyTorch, and no kernel.
``kernels``: all that ``use_liger_kernel`` brings, among it kernels of the model's layers, which are written in Triton;
on the software accelerator Triton's interpreter runs them.

Imports the standard library, and torch inside a function.
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
    """Those of a config that a setting's value of the axis means.

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
    """What is not installed here that the setting needs; empty where nothing is."""
    if setting.get("liger") and importlib.util.find_spec("liger_kernel") is None:
        return "Liger is not installed; cells that have it are run by: nox -s matrix -- --liger"
    return ""


def uncompiled(setting: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Within, nothing is compiled with Liger: it has its losses compiled, which the software accelerator cannot do."""
    if not setting.get("liger"):
        return contextlib.nullcontext()
    from torch.compiler import set_stance

    stance: contextlib.AbstractContextManager[None] = set_stance("force_eager")
    return stance
