"""TRL's legacy RLOO compared with the reference: what agrees, what is known to part, and that faults are found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.catalog import known_issues
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
    not stack.satisfied({"trl": ">=0.9.6,<0.22"}, INSTALLED), reason=f"trl {INSTALLED['trl']} has another RLOO trainer"
)
TRAINER = "first_rloo"
PADDED = {"logs[policy/entropy_avg]", "logs[val/ratio]", "logs[val/ratio_var]", "logs[objective/entropy]"}
"""TRL counts padding in them, where responses have unequal lengths (trl 6809, trl 2022)."""
STOP = "generation[stop_token]"
"""It generates on behind a stop token, which it then cuts off."""
ROWS = {"data[rows of a batch]"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    return tiny.qwen2(directory=tmp_path_factory.mktemp("models"), initializer_range=0.3)


def stages_of(found: Mapping[str, Any]) -> dict[str, set[str]]:
    return {name: {each["stage"] for each in one["differences"]} for name, one in found.items()}


def test_trl_and_the_reference_agree_on_every_number_that_no_padding_counts_in(
    launch: Launcher, model: tiny.TinyModel
) -> None:
    settings = {
        "no padding": {"stop_token": None},
        "ends": {},
        "all terms": {"rloo_k": 4, "kl_coef": 1.0, "cliprange": 0.01, "temperature": 0.7, "num_ppo_epochs": 3},
    }
    (found,) = launch(driver.compare_with_reference, TRAINER, "upstream", model, settings, strategy="single").values
    assert [one["failure"] for one in found.values()] == [None] * 3
    assert stages_of(found) == {"no padding": set(), "ends": PADDED | {STOP}, "all terms": PADDED | {STOP}}
    assert all(one["compared"] > 300 for one in found.values())


@pytest.mark.skipif(not stack.satisfied({"trl": ">=0.14"}, INSTALLED), reason="RLOOConfig has these from 0.14 on")
def test_what_the_trainer_took_from_reinforce_plus_plus(launch: Launcher, model: tiny.TinyModel) -> None:
    settings: dict[str, dict[str, Any]] = {
        "rewards": {"normalize_reward": True, "reward_clip_range": 0.5},
        "advantages": {"normalize_advantage": True},
        "divergences": {"token_level_kl": True, "kl_coef": 1.0},
        "a function": {"reward_function": True},
        "clipped alone": {"reward_clip_range": 0.5},
    }
    (found,) = launch(driver.compare_with_reference, TRAINER, "upstream", model, settings, strategy="single").values
    (stop, clipped, *_) = found.pop("clipped alone")["differences"]
    assert stop["stage"] == STOP
    assert (clipped["stage"], clipped["where"]) == ("rewards", "batch 0")
    assert stages_of(found) == {
        "rewards": PADDED | {STOP, "logs[objective/scores]"},
        **dict.fromkeys(("advantages", "divergences", "a function"), PADDED | {STOP}),
    }


def test_what_is_known_to_part_is_found_where_it_does(launch: Launcher, model: tiny.TinyModel) -> None:
    settings: dict[str, dict[str, Any]] = {**STEPS, "logging": {"logging_steps": 2}, "white": {"whiten_rewards": True}}
    (found,) = launch(driver.compare_with_reference, TRAINER, "upstream", model, settings, strategy="single").values
    (stop, lines) = found.pop("logging")["differences"]
    assert (stop["stage"], stop["found"][: len(stop["expected"])]) == (STOP, stop["expected"])
    assert (lines["stage"], lines["expected"], lines["found"]) == ("logs[number of lines]", [1.0], [3.0])
    firsts = {
        name: next(each for each in one["differences"] if not each["stage"].startswith(("logs[", STOP)))
        for name, one in found.items()
    }
    assert {name: (each["stage"].partition("[")[0], each["where"]) for name, each in firsts.items()} == {
        "clipping": ("gradients", "batch 0, step 0"),
        # The data loader has two batches, and with its last one Accelerate steps after each micro-batch.
        "accumulation": ("steps", "batch 1"),
        "mini-batches": ("data", "training"),
        "white": ("baselines", "batch 0"),
    }
    assert (firsts["accumulation"]["expected"], firsts["accumulation"]["found"]) == ([2.0], [4.0])
    assert (firsts["mini-batches"]["expected"], firsts["mini-batches"]["found"]) == ([8.0], [16.0])


def test_the_corrected_trainer_clips_and_steps_as_its_arguments_say(launch: Launcher, model: tiny.TinyModel) -> None:
    settings = {**STEPS, "uneven": {"gradient_accumulation_steps": 4, "num_mini_batches": 2, "max_grad_norm": 0.1}}
    (found,) = launch(driver.compare_with_reference, TRAINER, "corrected", model, settings, strategy="single").values
    assert {name: one["failure"] for name, one in found.items()} == dict.fromkeys(settings)
    stages = {name: each - PADDED - {STOP} for name, each in stages_of(found).items()}
    assert stages == {"clipping": set(), "accumulation": set(), "mini-batches": ROWS, "uneven": ROWS}


def test_the_corrected_trainer_counts_ends_of_sequence_of_all_ranks(launch: Launcher, model: tiny.TinyModel) -> None:
    launch(models.save_model, model, strategy="single")
    base = {"base": {"stop_token": "none"}}
    accumulated = {**base, "accumulation": STEPS["accumulation"]}
    upstream, corrected = (
        launch(driver.compare_with_reference, TRAINER, subject, model, settings, strategy="ddp").values[0]
        for subject, settings in (("upstream", base), ("corrected", accumulated))
    )
    (first, *_) = upstream["base"]["differences"]
    assert first["stage"] == "logs[val/num_eos_tokens]"
    assert first["found"] < first["expected"]
    assert {name: each - PADDED - {STOP} for name, each in stages_of(corrected).items()} == {
        "base": set(),
        "accumulation": set(),
    }


def cures_of_classes(model: tiny.TinyModel) -> list[Any]:
    """Kind of the installed trainer, and whether the corrected class is it with the cures of that kind."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    from pytest_trlcompat import trainers
    from pytest_trlcompat.trainers.curing.compose import kind_of
    from pytest_trlcompat.trainers.curing.kinds import KINDS

    own = [each.__name__ for each in trainers.RLOOTrainer.__mro__]
    kind = kind_of(RLOOTrainer)
    return [kind, issubclass(trainers.RLOOTrainer, RLOOTrainer), set(KINDS[kind]) <= set(own)]


def test_the_corrected_trainer_has_the_cures_of_its_kind(launch: Launcher, model: tiny.TinyModel) -> None:
    assert launch(cures_of_classes, model, strategy="single", sharded=False).values[0] == [TRAINER, True, True]


def test_a_suite_reduces_what_nothing_explains(launch: Launcher, model: tiny.TinyModel) -> None:
    known_alone = {name: each for name, each in known_issues.load().items() if name == "first-rloo-stop-token"}
    trainings = ConformanceTrainings(LaunchCache(launch), model, catalog=Catalog(known_alone))
    finding = trainings.judge("upstream", "single-logging_steps", TRAINER)
    assert (finding.verdict.value, finding.evidence["stage"]) == ("silent", "logs[number of lines]")
    assert finding.evidence["fewest_settings"] == {"logging_steps": 2}
    known = ConformanceTrainings(trainings.launches, model).judge("upstream", "single-logging_steps", TRAINER)
    assert (known.verdict.value, known.evidence["symptoms_of"]) == (
        "blocked",
        ["first-rloo-stop-token", "first-rloo-logging-steps"],
    )


def planted(fault: str, model: tiny.TinyModel) -> dict[str, Any]:
    """Hold the trainer with a fault in one of the functions that its module calls."""
    from types import SimpleNamespace
    from unittest import mock

    from trl.trainer import rloo_trainer as module

    ends, reward = module.first_true_indices, module.get_reward

    def one_row(rows: int) -> list[int]:
        return [0] * rows

    def rolled(*arguments: Any) -> Any:
        full, score, last = reward(*arguments)
        return full, score.roll(1, 0), last

    faults = {
        "one row for all": {"np": SimpleNamespace(random=SimpleNamespace(permutation=one_row))},
        "a token more": {"first_true_indices": lambda bools: ends(bools) + 1},
        "scores of other rows": {"get_reward": rolled},
    }
    with mock.patch.dict(vars(module), faults[fault]):
        return driver.compare_with_reference(TRAINER, "upstream", model, {fault: {}})[fault]


def test_a_batch_that_is_not_trained_on_as_it_was_sampled_is_found(launch: Launcher, model: tiny.TinyModel) -> None:
    (found,) = launch(planted, "one row for all", model, strategy="single").values
    assert found["failure"] is None
    (first,) = found["differences"]
    assert first["stage"] == "updates"
    assert first["said"].startswith("batch 0: a micro-batch has a row that was not sampled or used: [")


@pytest.mark.parametrize("fault, stage", [("a token more", "mask"), ("scores of other rows", "scores")])
def test_a_planted_fault_is_found_where_it_is(fault: str, stage: str, launch: Launcher, model: tiny.TinyModel) -> None:
    (found,) = launch(planted, fault, model, strategy="single").values
    assert found["failure"] is None
    first = next(each for each in found["differences"] if each["stage"] != STOP)
    assert (first["stage"], first["where"]) == (stage, "batch 0")
    assert first["off"] > 10 * first["allowed"]
