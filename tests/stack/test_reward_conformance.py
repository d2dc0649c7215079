"""Reward models and RLOO held against the reference: no difference where nothing is wrong, a fault where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.conformance import driver
from pytest_trlcompat.launch import Launcher

NEWEST = stack.satisfied({"trl": ">=1.10"}, stack.installed())
pytestmark = pytest.mark.skipif(not NEWEST, reason="planted into what the newest releases have")


def held(trainer: str, fault: str, setting: dict[str, Any], folder: str) -> dict[str, Any]:
    """A training with a fault planted into TRL's trainer, in a process of its own."""
    import trl

    model = tiny.qwen2(initializer_range=0.3, num_hidden_layers=1, directory=folder)
    cls: Any = {"reward": trl.RewardTrainer, "rloo": trl.RLOOTrainer}[trainer]
    loss, prepare = cls.compute_loss, cls._prepare_dataset if trainer == "reward" else None

    def other_margins(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return loss(self, model, {**inputs, "margin": inputs["margin"].mean()}, *args, **kwargs)

    def other_advantages(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return loss(self, model, {**inputs, "advantages": inputs["advantages"] * 0.9}, *args, **kwargs)

    def shorter(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert prepare is not None
        found = prepare(self, *args, **kwargs)
        return found.map(lambda row: {"rejected_ids": row["rejected_ids"][:-1]})

    if fault == "margins":
        cls.compute_loss = other_margins
    elif fault == "advantages":
        cls.compute_loss = other_advantages
    elif fault == "data":
        cls._prepare_dataset = shorter
    found: dict[str, Any] = driver.compare_with_reference(trainer, "upstream", model, {"one": setting})["one"]
    return found


@pytest.mark.parametrize(
    ("trainer", "fault", "setting", "stage"),
    [
        ("reward", "", {"margins": True, "gradient_accumulation_steps": 2}, None),
        ("reward", "margins", {"margins": True}, "logs[grad_norm]"),
        ("reward", "data", {}, "data[rejected_ids]"),
        ("rloo", "", {"beta": 0.5, "normalize_advantages": True}, None),
        ("rloo", "advantages", {"beta": 0.5}, "logs[grad_norm]"),
    ],
)
def test_a_fault_is_found_in_its_stage(
    trainer: str, fault: str, setting: dict[str, Any], stage: str | None, launcher: Launcher, tmp_path: Path
) -> None:
    found = launcher(held, trainer, fault, setting, str(tmp_path), strategy="single").values[0]
    assert found["failure"] is None
    assert found["compared"] > 70
    stages = [difference["stage"] for difference in found["differences"]]
    assert stages[:1] == ([] if stage is None else [stage])
