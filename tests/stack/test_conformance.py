"""The comparison sees what is wrong, in the stage where it is, and nothing where nothing is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.launch import Launcher
from suites.conformance.trainings import ConformanceTrainings
from suites.in_rank import conformance
from suites.launches import LaunchCache

NEWEST = tuple(map(int, stack.installed()["trl"].split(".")[:2])) >= (1, 10)
pytestmark = pytest.mark.skipif(not NEWEST, reason="planted into what the newest releases have")


def held(fault: str, setting: dict[str, Any], folder: str) -> dict[str, Any]:
    """A training with a fault planted into TRL's trainer, in a process of its own."""
    import torch
    import trl

    model = tiny.qwen2(initializer_range=0.3, num_hidden_layers=1, directory=folder)
    trainer = trl.GRPOTrainer
    method = trainer._get_per_token_logps_and_entropies

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        logps, *rest = method(self, *args, **kwargs)
        return (logps * 1.001, *rest) if torch.is_grad_enabled() else (logps, *rest)

    def entropies(self: Any, *args: Any, **kwargs: Any) -> Any:
        logps, found, *rest = method(self, *args, **kwargs)
        return (logps, None if found is None else found + 0.01, *rest)

    def drop(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["advantages"] = inputs["advantages"] * 0.9
        return loss(self, model, inputs, *args, **kwargs)

    loss = trainer.compute_loss
    planted: dict[str, tuple[str, Callable[..., Any]]] = {
        "logprobs": ("_get_per_token_logps_and_entropies", wrong),
        "entropies": ("_get_per_token_logps_and_entropies", entropies),
        "grad_norm": ("compute_loss", drop),
    }
    if fault:
        setattr(trainer, *planted[fault])
    return conformance.hold("grpo", "upstream", model, {"one": setting})["one"]


@pytest.mark.parametrize("fault", ["", "logprobs", "entropies", "grad_norm"])
def test_a_planted_fault_is_found_in_its_stage(fault: str, launcher: Launcher, tmp_path: Path) -> None:
    found = launcher(held, fault, {"loss_type": "grpo", "beta": 0.1}, str(tmp_path), strategy="single").values[0]
    assert found["failure"] is None
    assert found["compared"] > 100
    stages = [difference["stage"] for difference in found["differences"]]
    assert stages[:1] == ([] if not fault else ["logs[grad_norm]"] if fault == "grad_norm" else [fault])


def test_a_finding_names_its_fewest_settings(launcher: Launcher, tmp_path: Path) -> None:
    """Of a message that ends with an assistant's, which the newest releases do not continue."""
    model = tiny.qwen2(initializer_range=0.3, num_hidden_layers=1, directory=tmp_path)
    trainings = ConformanceTrainings(LaunchCache(launcher), model, catalog=Catalog())  # in which nothing is known
    finding = trainings.judge("upstream", "single-assistant_last", "grpo")
    assert finding.verdict.value == "silent"
    assert (finding.evidence["stage"], finding.evidence["fewest_settings"]) == ("prompts", {"data": "assistant_last"})
