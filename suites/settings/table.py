"""What the label of a row means: which settings are chosen together, under which strategy.

The rows are the strategies of the entry ``setting-equivalence`` in the catalogue. Together they hold every pair of
values of two axes that can be chosen together; ``tests/test_settings_table.py`` fails where one is missing. Most were
made by ``allpairspy``, the others added by hand: what stops a training on its own has a row without anything else.

Runs in the test process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_trlcompat.strategies import DISTINCT

__all__ = ["AXES", "FEW", "PLAIN", "Row", "row"]

PLAIN = ""
"""The value of an axis that a label does not name: float32, a dense model, no adapter, nothing recomputed or moved."""
AXES: Mapping[str, tuple[str, ...]] = {
    "strategy": DISTINCT,
    "memory": (PLAIN, "offload_optimizer", "offload_parameters", "persistent", "ram_loading"),
    "precision": (PLAIN, "bf16", "bf16_weights"),
    "model": (PLAIN, "tied", "moe", "vision"),
    "adapter": (PLAIN, "peft_config", "peft_model", "qlora"),
    "checkpointing": (PLAIN, "checkpointing", "wrapper_checkpointing"),
    "compile": (PLAIN, "compiled"),
}
"""``persistent``: DeepSpeed's default ``stage3_param_persistence_threshold``, below which lie all parameters of a tiny
model. ``ram_loading``: Accelerate's ``cpu_ram_efficient_loading``, by which rank 0 alone reads the model.
``bf16``: the argument of the Trainer, which DeepSpeed and FSDP take for their own mixed precision.
``wrapper_checkpointing``: FSDP's own activation checkpointing, ``checkpointing`` the model's. ``compiled``:
``torch_compile``, with a backend that needs no compiler."""
FEW = frozenset(
    {
        "single-qlora",
        "ddp-bf16_weights-vision-peft_model-checkpointing",
        "zero2-offload_optimizer-moe-peft_model-checkpointing",
        "zero3-persistent-bf16-tied-peft_model-checkpointing",
        "fsdp1-bf16-peft_config",
        "fsdp1-ram_loading-moe",
        "fsdp2-offload_parameters",
        "fsdp2-vision-peft_config-wrapper_checkpointing",
    }
)
"""Rows that hold every value but ``compiled``, for a sweep of the default cells; all are part of a full one."""
_OPTIONS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("zero", "offload_optimizer"): {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,  # SGD steps on the CPU
    },
    ("zero", "offload_parameters"): {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
    ("zero", "persistent"): {"zero_optimization": {"stage3_param_persistence_threshold": 100_000}},
    ("fsdp", "offload_parameters"): {"offload_params": True},
    ("fsdp", "ram_loading"): {"cpu_ram_efficient_loading": True},
    ("fsdp", "wrapper_checkpointing"): {"activation_checkpointing": True},
}


@dataclass(frozen=True)
class Row:
    """Values by axis; see :data:`AXES`."""

    values: Mapping[str, str]

    @property
    def strategy(self) -> str:
        return self.values["strategy"]

    @property
    def options(self) -> dict[str, Any]:
        """Of the strategy, as a launch takes them."""
        # The strategies of a family, zero1 to zero3 say, have their options in common.
        chosen = (_OPTIONS.get((self.strategy[:4], value), {}) for value in self.values.values())
        return {name: option for options in chosen for name, option in options.items()}

    @property
    def setting(self) -> dict[str, str]:
        """What a rank chooses in Python; see :func:`suites.in_rank.settings.train`."""
        model = {"checkpointing": "model"} if self.values["checkpointing"] == "checkpointing" else {}
        adapter = {"adapter": self.values["adapter"]} if self.values["adapter"] else {}
        return {
            **self.setting_of_one_process,
            **adapter,
            **model,
            **({"compile": "compiled"} if self.values["compile"] else {}),
        }

    @property
    def checkpointing(self) -> tuple[str, ...]:
        """Who is to recompute activations, as a rank names it; empty where nobody was asked to."""
        return {"checkpointing": ("model",), "wrapper_checkpointing": ("wrapper",)}.get(
            self.values["checkpointing"], ()
        )

    @property
    def setting_of_one_process(self) -> dict[str, str]:
        """Of :attr:`setting` what changes numbers, for the training of one process: nothing else may.

        A quantised base must give what its weights give as they are when they are computed with.
        """
        chosen = {axis: self.values[axis] for axis in ("precision", "adapter") if self.values[axis]}
        return {**chosen, "adapter": "dequantised"} if chosen.get("adapter") == "qlora" else chosen


def row(label: str) -> Row:
    """
    Raises:
        ValueError: it names a value that no axis has, or two of one axis.
    """
    values = dict.fromkeys(AXES, PLAIN)
    for part in label.split("-"):
        axis = next((axis for axis, known in AXES.items() if part in known and part), None)
        if axis is None or values[axis]:
            raise ValueError(f"{label}: no axis has {part!r}, or two values are of one axis")
        values[axis] = part
    return Row(values)
