"""TRL's PPO held against the reference: what agrees, what is known to part, and that a planted fault is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.conformance import driver
from pytest_trlcompat.launch import Launcher
from suites.conformance.trainings import ConformanceTrainings
from suites.in_rank import models
from suites.launches import LaunchCache
from tests.stack.on_policy_settings import STEPS

pytest.importorskip("trl")

INSTALLED = stack.installed()
pytestmark = pytest.mark.skipif(
    not stack.satisfied({"trl": ">=0.9.6,<1.13"}, INSTALLED), reason=f"trl {INSTALLED['trl']} has no PPO trainer"
)
NOT_CURED = {"logs[policy/approxkl_avg]", "logs[policy/entropy_avg]", "logs[val/ratio]", "logs[val/ratio_var]"}
"""TRL averages them over padding, too, where responses have unequal lengths (trl 6809)."""
PADDED = NOT_CURED | (
    {"logs[objective/entropy]"} if stack.satisfied({"trl": "<1.10"}, INSTALLED) else set()
)  # trl 6121


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    return tiny.qwen2(directory=tmp_path_factory.mktemp("models"), initializer_range=0.3)


def planted(fault: str, model: tiny.TinyModel, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Hold the trainer with a fault in one of the functions that its module calls."""
    import inspect
    import sys
    from types import SimpleNamespace
    from unittest import mock

    import torch

    from pytest_trlcompat.trainers.curing.trl_ppo import ppo_trainer_class

    module = sys.modules[inspect.unwrap(ppo_trainer_class().train).__module__]
    whiten, reward, mean = module.masked_whiten, module.get_reward, module.masked_mean

    def late(model: Any, ids: torch.Tensor, pad: int, context_length: int) -> Any:
        full, score, ends = reward(model, ids, pad, context_length)
        return full.roll(-1, 1), score, ends

    def over_all(values: torch.Tensor, mask: torch.Tensor, axis: Any = None) -> torch.Tensor:
        averaged: torch.Tensor = mean(values, torch.ones_like(mask) if torch.is_grad_enabled() else mask)
        return averaged  # of losses alone: whitening calls it without gradients

    faults = {
        "values a step late": {"get_reward": late},
        "one row for all": {"np": SimpleNamespace(random=SimpleNamespace(permutation=lambda rows: [0] * rows))},
        "advantages as they are": {"masked_whiten": lambda values, mask, shift_mean=True: values},
        "means over padding": {"masked_mean": over_all},
        "whitened with a shifted mean": {
            "masked_whiten": lambda values, mask, shift_mean=True: whiten(values, mask, True)
        },
    }
    with mock.patch.dict(vars(module), faults[fault]):
        return driver.compare_with_reference("ppo", "upstream", model, {fault: setting})[fault]


def test_trl_and_the_reference_agree_on_every_number_that_no_padding_counts_in(
    launch: Launcher, model: tiny.TinyModel
) -> None:
    settings = {
        "no padding": {"stop_token": None},
        "ends": {},
        "all terms": {"kl_estimator": "k3", "gamma": 0.9, "cliprange": 0.01, "whiten_rewards": True},
    }
    (found,) = launch(driver.compare_with_reference, "ppo", "upstream", model, settings, strategy="single").values
    assert [one["failure"] for one in found.values()] == [None] * 3
    stages = {name: {each["stage"] for each in one["differences"]} for name, one in found.items()}
    assert stages == {"no padding": set(), "ends": PADDED, "all terms": PADDED}
    assert all(one["compared"] > 600 for one in found.values())


def test_what_is_known_to_part_is_found_where_it_does(launch: Launcher, model: tiny.TinyModel) -> None:
    settings: dict[str, dict[str, Any]] = {**STEPS, "logging": {"logging_steps": 2}}
    (found,) = launch(driver.compare_with_reference, "ppo", "upstream", model, settings, strategy="single").values
    (lines,) = found.pop("logging")["differences"]
    assert (lines["stage"], lines["expected"], lines["found"]) == ("logs[number of lines]", [1.0], [3.0])
    firsts = {
        name: next(each for each in one["differences"] if not each["stage"].startswith("logs["))
        for name, one in found.items()
    }
    assert {name: (each["stage"].partition("[")[0], each["where"]) for name, each in firsts.items()} == {
        "clipping": ("gradients", "batch 0, step 0"),
        # The data loader has two batches, and with its last one Accelerate steps after each micro-batch.
        "accumulation": ("steps", "batch 1"),
        "mini-batches": ("steps", "batch 0" if stack.satisfied({"trl": ">=0.17"}, INSTALLED) else "batch 1"),
    }
    assert (firsts["accumulation"]["expected"], firsts["accumulation"]["found"]) == ([2.0], [4.0])


def test_the_corrected_trainer_clips_and_steps_as_its_arguments_say(launch: Launcher, model: tiny.TinyModel) -> None:
    settings = {**STEPS, "uneven": {"gradient_accumulation_steps": 4, "num_mini_batches": 2, "max_grad_norm": 0.1}}
    (found,) = launch(driver.compare_with_reference, "ppo", "corrected", model, settings, strategy="single").values
    assert {name: one["failure"] for name, one in found.items()} == dict.fromkeys(settings)
    stages = {name: {each["stage"] for each in one["differences"]} - NOT_CURED for name, one in found.items()}
    assert stages == {name: set() for name in settings}


def test_the_corrected_trainer_counts_ends_of_sequence_of_all_ranks(launch: Launcher, model: tiny.TinyModel) -> None:
    launch(models.save_model, model, strategy="single")
    settings = {"base": {"stop_token": "none"}, **STEPS}
    upstream, corrected = (
        launch(driver.compare_with_reference, "ppo", subject, model, settings, strategy="ddp").values[0]
        for subject in ("upstream", "corrected")
    )
    (first, *_) = upstream["base"]["differences"]
    assert first["stage"] == "logs[val/num_eos_tokens]"
    assert first["found"] < first["expected"]
    stages = {name: {each["stage"] for each in one["differences"]} - NOT_CURED for name, one in corrected.items()}
    assert stages == {name: set() for name in settings}


def settings_of_accelerator(model: tiny.TinyModel) -> list[Any]:
    """Of a corrected trainer before and after a training, and the error of one under DeepSpeed."""
    from pytest_trlcompat.conformance.ppo import objects as ppo

    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 2,
    }
    trainer = ppo.build_trainer("corrected", model, **arguments)
    counting = trainer.accelerator.gradient_state.plugin_kwargs
    seen: list[Any] = [dict(counting)]
    try:
        trainer.train()
    except RuntimeError as error:
        seen.append(f"{type(error).__name__}: {error}")
    return [*seen, dict(counting), "step" in vars(trainer.optimizer)]


def test_the_accelerator_counts_as_before_when_a_training_has_ended(launch: Launcher, model: tiny.TinyModel) -> None:
    (before, after, changed) = launch(settings_of_accelerator, model, strategy="single").values[0]
    assert before == after
    assert before["num_steps"] == 2
    assert not changed


@pytest.mark.skipif(not stack.satisfied({"trl": ">=0.17"}, INSTALLED), reason="DeepSpeed's engine counts right before")
def test_an_engine_that_counts_otherwise_is_refused(launch: Launcher, model: tiny.TinyModel) -> None:
    launch(models.save_model, model, strategy="single")
    (_, error, *_) = launch(settings_of_accelerator, model, strategy="zero2", sharded=False).values[0]
    assert error.startswith("CureError: PPOOptimizerStepsMixin with trl")
    assert "after the 1 micro-batches of a mini-batch, but it steps after 2. Set num_mini_batches=1" in error


def test_a_suite_reduces_what_nothing_explains(launch: Launcher, model: tiny.TinyModel) -> None:
    trainings = ConformanceTrainings(LaunchCache(launch), model, catalog=Catalog())  # in which nothing is known
    finding = trainings.judge("upstream", "single-logging_steps", "ppo")
    assert (finding.verdict.value, finding.evidence["stage"]) == ("silent", "logs[number of lines]")
    assert finding.evidence["fewest_settings"] == {"logging_steps": 2}
    finding = trainings.judge("upstream", "single-adamw", "ppo")
    assert finding.evidence["stage"] in PADDED
    assert finding.evidence["fewest_settings"] == {}, "it shows without"
    known = ConformanceTrainings(trainings.launches, model).judge("upstream", "single-logging_steps", "ppo")
    assert (known.verdict.value, known.evidence["symptoms_of"]) == ("blocked", ["ppo-logging-steps"])


def test_a_batch_that_is_not_trained_on_as_it_was_sampled_is_found(launch: Launcher, model: tiny.TinyModel) -> None:
    (found,) = launch(planted, "one row for all", model, {}, strategy="single").values
    assert found["failure"] is None
    (first,) = found["differences"]
    assert first["stage"] == "updates"
    assert first["said"].startswith("batch 0: a micro-batch has a row that was not sampled or used: [")


@pytest.mark.parametrize(
    "fault, setting, stage",
    [
        ("values a step late", {}, "values"),
        ("advantages as they are", {}, "advantages"),
        ("whitened with a shifted mean", {"whiten_rewards": True}, "whitened_rewards"),
        ("means over padding", {}, "gradients[policy.model.embed_tokens.weight]"),
    ],
)
def test_a_planted_fault_is_found_where_it_is(
    fault: str, setting: Mapping[str, Any], stage: str, launch: Launcher, model: tiny.TinyModel
) -> None:
    (found,) = launch(planted, fault, model, setting, strategy="single").values
    assert found["failure"] is None
    first = found["differences"][0]
    assert (first["stage"], first["where"].partition(",")[0]) == (stage, "batch 0")
    assert first["off"] > 10 * first["allowed"]
