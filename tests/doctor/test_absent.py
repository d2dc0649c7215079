"""Strategies and trainers that a stack does not have: said to be absent, never right, never recommended."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.existence import absent_strategy
from pytest_trlcompat.catalog.ranges import ALL, at
from pytest_trlcompat.doctor.applicable import StrategyError
from pytest_trlcompat.doctor.diagnosis import Diagnosis, diagnose
from pytest_trlcompat.doctor.request import read_stack_spec

from .made_up import ask, cell, issue, predict


def published(*pins: str, strategies: tuple[str, ...] = (), trainer: str = "") -> Diagnosis:
    """The answer about a stack by the catalogue and the evidence of this project."""
    spec = read_stack_spec(list(pins), [], lambda _: b"")
    return diagnose(spec, known_issues.load(), evidence.published(), strategies, trainer)


def test_sft_under_fsdp2_is_absent_with_a_trainer_that_cannot_prepare_for_it() -> None:
    with pytest.raises(StrategyError) as refused:
        published("trl==0.16.1", "transformers==4.50.3", "accelerate==1.6.0", strategies=("fsdp2",), trainer="sft")
    assert str(refused.value) == (
        "strategy fsdp2 is absent with transformers 4.50.3 (the command line): the Trainer prepares its model without "
        "the optimizer, which Accelerate refuses under FSDP2; take transformers>=4.51, or ask about another strategy"
    )


@pytest.mark.parametrize("trainer", ["", "dpo", "ppo"])
def test_fsdp2_is_absent_with_an_accelerate_that_does_not_know_it(trainer: str) -> None:
    with pytest.raises(StrategyError, match="absent with accelerate 1.5.2 .*; take accelerate>=1.6, or"):
        published("trl==0.12.2", "transformers==4.52.4", "accelerate==1.5.2", strategies=("fsdp2",), trainer=trainer)


@pytest.mark.parametrize("trainer", ["dpo", "sft", "kto", "reward"])
def test_no_stack_without_fsdp2_is_recommended_for_it(trainer: str) -> None:
    found = published("trl==0.19.1", "transformers==4.52.4", strategies=("fsdp2",), trainer=trainer)
    recommended = [*found.pins, *([found.fewest] if found.fewest else [])]
    for pins in recommended:
        versions = {package: at(text) for package, text in pins.cell.versions.items()}
        assert absent_strategy("fsdp2", versions, trainer) is None, pins.cell.id


def test_ppo_is_absent_where_trl_has_removed_it() -> None:
    with pytest.raises(StrategyError, match=r"trainer ppo is absent with trl 1\.16\.0 .*: PPO was removed in 1\.13\.0"):
        published("trl==1.16.0", trainer="ppo")
    assert published("trl==1.12.0", trainer="ppo").issues


def test_what_another_trainers_issue_stops_is_not_stopped_for_who_asks() -> None:
    found = published(
        *("trl==0.19.1", "transformers==4.52.4", "accelerate==1.7.0"), strategies=("fsdp2",), trainer="sft"
    )
    verdicts = {each.issue.id: each.effects[0].verdict.value for each in found.issues}
    assert verdicts["fsdp-sharded-save"] == "silent"
    assert "lora-fsdp2-generation" not in verdicts  # SFT does not generate
    assert "lora-fsdp2-generation" not in found.clear


def test_what_is_predicted_only_behind_another_trainers_issue_is_called_unpredicted() -> None:
    stopping = issue(predict("broken"), name="grpo-first")
    stopped = issue(dataclasses.replace(predict("blocked"), by="grpo-first"), name="one")
    found = ask("trl==0.15.2", issues=[stopping, stopped], strategies=["single"], trainer="sft")
    assert (found.issues, found.unpredicted, found.is_clear) == ((), ("one",), False)
    assert ask("trl==0.15.2", issues=[issue(predict("ok"))], strategies=["single"], trainer="sft").is_clear


def test_a_search_for_unknown_issues_is_none() -> None:
    counted = {each.issue.id for each in published("trl==1.16.0", "transformers==5.23.0").issues}
    assert not {name for name in counted if name.startswith("conformance-")}
    assert len(counted) > 50


def test_a_strategy_that_was_seen_to_train_is_there_whatever_the_table_says() -> None:
    entry = issue(predict("broken", trl="==0.16.0"), predict("ok"), strategies=())
    seen = cell("0.17.0", "4.50.3", fsdp2="ok")
    found = ask("trl==0.16.0", issues=[entry], cells=[seen], strategies=["fsdp2"])
    assert [pins.cell.id for pins in found.pins] == [seen.id]


def test_what_is_not_certain_is_not_called_absent() -> None:
    assert absent_strategy("fsdp2", {"accelerate": ALL}) is None
    assert absent_strategy("fsdp2", {}) is None
    assert absent_strategy("fsdp2", {"accelerate": at("1.5.2")}) is not None
    assert absent_strategy("fsdp2", {"transformers": at("4.50.3")}) is None  # PPO trains there
    assert absent_strategy("fsdp2", {"transformers": at("4.50.3")}, "ppo") is None
    assert absent_strategy("fsdp1", {"accelerate": at("1.5.2")}) is None
