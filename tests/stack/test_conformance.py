"""The comparison sees what is wrong, in the stage where it is, and nothing where nothing is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.conformance import driver
from pytest_trlcompat.launch import Launcher
from suites.conformance.trainings import ConformanceTrainings
from suites.launches import LaunchCache

NEWEST = tuple(map(int, stack.installed()["trl"].split(".")[:2])) >= (1, 10)
pytestmark = pytest.mark.skipif(not NEWEST, reason="planted into what the newest releases have")


def held(fault: str, setting: dict[str, Any], folder: str) -> dict[str, Any]:
    """A training with a fault planted into TRL's trainer, in a process of its own."""
    import torch
    import trl

    from pytest_trlcompat.conformance.grpo import watching

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

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        logged = self._metrics["train"]
        logged.pop("kl", None)
        return logs_of(self, logs, *args, **kwargs)

    loss, logs_of = trainer.compute_loss, trainer.log
    planted: dict[str, tuple[str, Callable[..., Any]]] = {
        "kl": ("log", log),
        "logprobs": ("_get_per_token_logps_and_entropies", wrong),
        "entropies": ("_get_per_token_logps_and_entropies", entropies),
        "grad_norm": ("compute_loss", drop),
    }
    if fault in planted:
        setattr(trainer, *planted[fault])
    elif fault == "unseen":
        del watching._INPUTS["advantages"]
    elif fault == "no hook":
        handle = SimpleNamespace(remove=lambda: None)
        optimizers: Any = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_pre_hook = lambda hook: handle
    return driver.compare_with_reference("grpo", "upstream", model, {"one": setting})["one"]


@pytest.mark.parametrize("fault", ["", "logprobs", "entropies", "grad_norm", "kl"])
def test_a_planted_fault_is_found_in_its_stage(fault: str, launcher: Launcher, tmp_path: Path) -> None:
    found = launcher(held, fault, {"loss_type": "grpo", "beta": 0.1}, str(tmp_path), strategy="single").values[0]
    assert found["failure"] is None
    assert found["compared"] > 100
    stages = [difference["stage"] for difference in found["differences"]]
    assert stages[:1] == ([] if not fault else [f"logs[{fault}]"] if fault in ("grad_norm", "kl") else [fault])
    if fault == "kl":
        assert found["differences"][0]["found"] == []


@pytest.mark.parametrize("fault, unseen", [("unseen", "advantages"), ("no hook", "gradients[")])
def test_what_the_recording_does_not_see_cannot_be_told(
    fault: str, unseen: str, launcher: Launcher, tmp_path: Path
) -> None:
    found = launcher(held, fault, {"loss_type": "grpo", "beta": 0.1}, str(tmp_path), strategy="single").values[0]
    assert (found["failure"], found["differences"]) == (None, [])
    assert found["unseen"][0].startswith(unseen)
    assert f"sees nothing of {unseen}" in found["shortfall"]


def test_a_parameter_on_which_no_output_depends_has_a_gradient_of_zeros(launcher: Launcher, tmp_path: Path) -> None:
    """The vision tower of a model whose prompts have no image."""
    found = launcher(held, "", {"model": "vision", "beta": 0.1}, str(tmp_path), strategy="single").values[0]
    assert (found["failure"], found["differences"], found["unseen"]) == (None, [], [])


def test_a_finding_names_its_fewest_settings(launcher: Launcher, tmp_path: Path) -> None:
    """Of a message that ends with an assistant's, which the newest releases do not continue."""
    model = tiny.qwen2(initializer_range=0.3, num_hidden_layers=1, directory=tmp_path)
    trainings = ConformanceTrainings(LaunchCache(launcher), model, catalog=Catalog())  # in which nothing is known
    finding = trainings.judge("upstream", "single-assistant_last", "grpo")
    assert finding.verdict.value == "silent"
    assert (finding.evidence["stage"], finding.evidence["fewest_settings"]) == ("prompts", {"data": "assistant_last"})
