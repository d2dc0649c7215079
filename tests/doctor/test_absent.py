"""Strategies and trainers that a stack does not have: said to be absent, never right, never recommended."""

from __future__ import annotations

import dataclasses
import io

import pytest

from pytest_trlcompat.catalog import evidence, known_issues, measurements
from pytest_trlcompat.catalog.existence import STRATEGIES
from pytest_trlcompat.catalog.issue import kind, measured_with
from pytest_trlcompat.catalog.ranges import ALL, at, parse
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.applicable import StrategyError, absent_strategy, partly_absent_strategies
from pytest_trlcompat.doctor.diagnosis import Diagnosis, diagnose
from pytest_trlcompat.doctor.request import read_stack_spec
from pytest_trlcompat.doctor.text import show

from .made_up import ask, cell, issue, predict


def published(*pins: str, strategies: tuple[str, ...] = (), trainer: str = "") -> Diagnosis:
    """The answer about a stack by the catalogue and the evidence of this project."""
    spec = read_stack_spec(list(pins), [], lambda _: b"")
    catalog = known_issues.load()
    return diagnose(spec, catalog, measurements.published(catalog), strategies, trainer)


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


@pytest.mark.parametrize(
    ("trl", "prefix"),
    [("0.9.6", "first-"), ("0.20.0", "first-"), ("0.21.0", "first-"), ("0.22.2", ""), ("1.16.0", "")],
)
def test_either_trainer_of_the_name_rloo_is_there(trl: str, prefix: str) -> None:
    ids = [applicable.issue.id for applicable in published(f"trl=={trl}", trainer="rloo").issues]
    assert {name.partition("rloo-")[0] for name in ids if "rloo-" in name} == {prefix}


def test_the_first_rloo_prepares_for_fsdp2_as_ppo_does() -> None:
    pins = ("trl==0.17.0", "transformers==4.50.3", "accelerate==1.6.0")
    assert published(*pins, strategies=("fsdp2",), trainer="rloo").strategies == ("fsdp2",)
    with pytest.raises(StrategyError, match="absent with accelerate 1.5.2"):
        published("trl==0.17.0", "accelerate==1.5.2", strategies=("fsdp2",), trainer="rloo")


def test_versions_without_the_strategy_are_named_where_the_stack_may_have_them() -> None:
    entry = issue(predict("ok"), strategies=("fsdp2", "single"))
    found = ask("trl==0.18.2", "accelerate>=1.5", issues=[entry], strategies=["fsdp2"], trainer="grpo")
    assert found.partly_absent == (
        "fsdp2 is absent with accelerate <1.6: Accelerate knows FSDP2 from 1.6.0 on, and takes FSDP1 before without a "
        "word; nothing is said about these versions",
        "fsdp2 is absent with transformers <4.51: the Trainer prepares its model without the optimizer, which "
        "Accelerate refuses under FSDP2; nothing is said about these versions",
    )
    assert (found.issues, found.is_clear) == ((), False)
    assert found.to_dict()["notes"] == list(found.partly_absent)
    settled = ask(
        *("trl==0.18.2", "accelerate==1.6.0", "transformers==4.52.4"),
        issues=[entry],
        strategies=["fsdp2"],
        trainer="grpo",
    )
    assert (settled.partly_absent, settled.is_clear) == ((), True)
    assert ask("trl==0.18.2", issues=[entry], strategies=["single"], trainer="grpo").is_clear


def test_the_text_does_not_call_a_stack_clear_of_which_nothing_is_predicted() -> None:
    stopping = issue(predict("broken"), name="grpo-first")
    stopped = issue(dataclasses.replace(predict("blocked"), by="grpo-first"), name="one")
    unknown = issue(predict("broken", trl="<0.10"), name="two")
    entries = [stopping, stopped, unknown]
    out = io.StringIO()
    show(ask("trl==0.15.2", issues=entries, cells=[cell("0.15.2")], strategies=["single"], trainer="sft"), out)
    assert out.getvalue().splitlines()[2:] == [
        "No known issue is predicted to affect this stack, but 2 cannot be judged; the nearest measured cell is",
        "  trl0.15.2-tf4.49.0.",
        "The catalogue makes no prediction for this stack about two.",
        "Known issues of other trainers stop the tests of one, so that nothing is known with this stack.",
    ]


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
    assert absent_strategy("fsdp2", {"torch": at("2.5.1"), "accelerate": at("1.6.0")}) is not None
    assert absent_strategy("fsdp1", {"accelerate": at("1.5.2")}) is None


def test_what_may_be_absent_is_partly_absent() -> None:
    accelerate, transformers, torch = STRATEGIES
    assert partly_absent_strategies("fsdp2", {}, "sft") == (accelerate, transformers)
    assert partly_absent_strategies("fsdp2", {}, "ppo") == (accelerate,)
    assert partly_absent_strategies("fsdp2", {}) == (accelerate,)
    assert partly_absent_strategies("fsdp2", {"accelerate": None}) == ()  # it is not installed at all
    assert partly_absent_strategies("fsdp2", {"accelerate": at("1.6.0"), "transformers": at("4.51.0")}, "sft") == ()
    assert partly_absent_strategies("fsdp2", {"torch": parse(">=2.5"), "accelerate": at("1.6.0")}) == (torch,)
    assert partly_absent_strategies("fsdp2", {"torch": at("2.6.0"), "accelerate": at("1.6.0")}) == ()
    assert partly_absent_strategies("fsdp1", {}, "sft") == ()


def test_the_table_says_what_was_measured() -> None:
    """In each published cell: what trained is not called absent, what was always absent under FSDP2 is."""
    agreeing = 0
    for measured in evidence.published().cells:
        versions = {package: at(text) for package, text in measured.versions.items()}
        seen: dict[tuple[str, str], set[Verdict]] = {}
        for (name, subject, label), verdict in measured.verdicts.items():
            if subject == "upstream":
                seen.setdefault((measured_with(name), kind(label)), set()).add(verdict)
        present = {trainer for (trainer, _), verdicts in seen.items() if verdicts != {Verdict.ABSENT}}
        for (trainer, strategy), verdicts in seen.items():
            absent = absent_strategy(strategy, versions, trainer) is not None
            assert not (absent and verdicts & {Verdict.OK, Verdict.SILENT, Verdict.WASTEFUL}), (measured.id, trainer)
            if strategy == "fsdp2" and trainer in present and verdicts == {Verdict.ABSENT}:
                assert absent, (measured.id, trainer)
                agreeing += 1
    assert agreeing > 40  # 57 on the day on which this was written
