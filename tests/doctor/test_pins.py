"""Which measured cells the doctor recommends: with the trainers that the question is about."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.catalog.issue import TRAINERS, kind, measured_with
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.diagnosis import Diagnosis
from pytest_trlcompat.doctor.pins import trainers_in
from pytest_trlcompat.doctor.requirements import of_pins
from pytest_trlcompat.doctor.stack_spec import of_mentions
from pytest_trlcompat.doctor.text import show

from .made_up import ask, cell, issue, predict

GRPO = issue(predict("absent", trl="<0.14"), predict("broken", trl="<0.18"), predict("ok"), name="grpo-one")
PPO = issue(predict("absent", trl=">=1.13"), predict("broken", trl="<0.18"), predict("ok"), name="ppo-one")


def measured(trl: str, grpo: str, ppo: str) -> MeasuredCell:
    verdicts = {"grpo-one": Verdict(grpo), "ppo-one": Verdict(ppo)}
    return dataclasses.replace(
        cell(trl), verdicts={(name, "upstream", "single"): verdict for name, verdict in verdicts.items()}
    )


CELLS = [measured("0.12.2", "absent", "ok"), measured("0.20.0", "ok", "ok"), measured("1.13.0", "ok", "absent")]


@pytest.mark.parametrize(
    ("trl", "trainer", "wrong", "recommended"),
    [
        ("1.12.0", "ppo", "ppo-two", "0.20.0"),  # 1.13.0 is nearer, and has no PPO
        ("1.12.0", "grpo", "grpo-two", "1.13.0"),
        ("0.14.0", "grpo", "grpo-two", "0.20.0"),  # 0.12.2 is nearer, and has no GRPO
        ("0.15.0", "", "grpo-two", "0.20.0"),  # it has both
        ("0.13.0", "", "ppo-two", "0.12.2"),  # it has PPO alone
        ("1.14.0", "", "grpo-two", "1.13.0"),  # it has GRPO alone
    ],
)
def test_pins_have_the_trainers_that_the_question_is_about(
    trl: str, trainer: str, wrong: str, recommended: str
) -> None:
    absent = predict("absent", trl="<0.14") if wrong.startswith("grpo") else predict("absent", trl=">=1.13")
    problem = issue(predict("broken", trl=f"=={trl}"), absent, predict("ok"), name=wrong)
    found = ask(f"trl=={trl}", issues=[GRPO, PPO, problem], cells=CELLS, strategies=["single"], trainer=trainer)
    assert [pins.cell.versions["trl"] for pins in found.pins] == [recommended]


def _shown(diagnosis: Diagnosis) -> list[str]:
    file = io.StringIO()
    show(diagnosis, file)
    return file.getvalue().splitlines()


def _measuring(trl: str, **verdicts: str) -> MeasuredCell:
    """``grpo="ok"``: the verdict of issue ``grpo-one`` under ``single``; ``ppo_zero3`` that of ``ppo-one`` there."""
    found = {}
    for name, verdict in verdicts.items():
        trainer, _, strategy = name.partition("_")
        found[f"{trainer}-one", "upstream", strategy or "single"] = Verdict(verdict)
    return dataclasses.replace(cell(trl), verdicts=found)


PPO_TWO = issue(predict("broken", trl="==1.12.0"), predict("absent", trl=">=1.13"), predict("ok"), name="ppo-two")


@pytest.mark.parametrize(
    "nearer",
    [
        _measuring("1.11.0", grpo="ok"),  # with another trainer alone
        _measuring("1.11.0", grpo="ok", ppo_zero3="ok"),  # under another strategy
        _measuring("1.11.0", ppo="untestable"),
        _measuring("1.13.0", ppo="absent"),
    ],
)
def test_a_cell_in_which_nobody_measured_the_trainer_under_the_strategy_is_not_recommended(
    nearer: MeasuredCell,
) -> None:
    asking: dict[str, Any] = {"issues": [GRPO, PPO, PPO_TWO], "strategies": ["single"], "trainer": "ppo"}
    found = ask("trl==1.12.0", cells=[nearer, _measuring("0.20.0", ppo="ok")], **asking)
    assert [(pins.cell.id, pins.trainers) for pins in found.pins] == [("trl0.20.0-tf4.49.0", ("ppo",))]
    assert found.nobody_measured == ()
    alone = ask("trl==1.12.0", cells=[nearer], **asking)
    assert (alone.pins, alone.fewest, alone.nobody_measured) == ((), None, ("single",))
    assert _shown(alone)[-1] == (
        "No cell of the sweep of 2026-11-21 was measured with PPOTrainer under single, so that no pins are recommended "
        "for that."
    )


def test_pins_are_for_the_strategies_that_somebody_measured_with_the_trainer() -> None:
    cells = [_measuring("0.20.0", ppo="ok")]
    found = ask("trl==1.12.0", issues=[PPO, PPO_TWO], cells=cells, strategies=["single", "zero3"], trainer="ppo")
    assert [(pins.cell.id, pins.strategies) for pins in found.pins] == [("trl0.20.0-tf4.49.0", ("single",))]
    assert found.to_dict()["nobody_measured"] == ["zero3"]
    assert _shown(found)[-2:] == [
        "No cell of the sweep of 2026-11-21 was measured with PPOTrainer under zero3, so that no pins are recommended "
        "for that.",
        "Nearest measured pins, ok for all issues under single: trl==0.20.0 transformers==4.49.0",
    ]


def test_where_no_trainer_is_asked_about_it_is_said_which_were_measured() -> None:
    grpo_two = issue(predict("broken", trl="==1.14.0"), predict("ok"), name="grpo-two")
    cells = [_measuring("1.13.0", grpo="ok")]
    found = ask("trl==1.14.0", issues=[GRPO, PPO, grpo_two], cells=cells, strategies=["single"])
    assert _shown(found)[-1] == (
        "Nearest measured pins, ok for all issues under single, measured with GRPOTrainer alone: trl==1.13.0 "
        "transformers==4.49.0"
    )


def test_nothing_is_recommended_for_a_trainer_that_the_published_sweep_does_not_measure() -> None:
    """ORPO has issues of its own, and rows of a suite, and no verdict in the evidence yet."""
    found = ask(
        "trl==1.16.0",
        "transformers==5.23.0",
        issues=list(known_issues.load().values()),
        cells=[
            dataclasses.replace(
                each, verdicts={key: verdict for key, verdict in each.verdicts.items() if "orpo" not in key[0]}
            )
            for each in evidence.published().cells
        ],
        trainer="orpo",
    )
    assert (found.pins, found.fewest, found.nobody_measured) == ((), None, found.strategies)


@pytest.mark.parametrize(("pins", "recommended"), [((), "1.14.0"), (("pillow==12.0.0",), "1.13.0")])
def test_packages_that_few_stacks_have_are_not_recommended_to_others(pins: tuple[str, ...], recommended: str) -> None:
    fine = {("one", "upstream", "single"): Verdict.OK}
    pictures = cell("1.13.0")
    pictures = dataclasses.replace(pictures, versions={**pictures.versions, "pillow": "12.0.0"}, verdicts=fine)
    cells = [pictures, dataclasses.replace(cell("1.14.0"), verdicts=fine)]
    problem = issue(predict("broken", trl="==1.12.0"), predict("ok"))
    found = ask("trl==1.12.0", *pins, issues=[problem], cells=cells, strategies=["single"])
    assert [each.cell.versions["trl"] for each in found.pins] == [recommended]


@pytest.mark.parametrize(
    ("pin", "absent"),
    [
        ("trl==0.13.0", ("distillation", "grpo", "rloo")),
        ("trl==0.15.2", ("distillation", "rloo")),
        ("trl==1.13.0", ("ppo",)),
        ("trl>=1.0", ()),
        ("transformers==5.0.0", ()),
    ],
)
def test_the_trainers_of_a_stack_are_those_that_are_not_predicted_absent(pin: str, absent: tuple[str, ...]) -> None:
    spec = of_mentions(of_pins([pin]), "the command line", complete=False)
    assert trainers_in(spec, known_issues.load()) == tuple(name for name in TRAINERS if name not in absent)
    assert trainers_in(spec, Catalog()) == TRAINERS


@pytest.mark.parametrize(
    ("pins", "trainer", "strategies", "prefixes"),
    [
        (("trl==0.13.0", "transformers==4.47.0"), "ppo", ("ddp",), ["ppo"]),
        (("trl==1.11.0", "transformers==5.20.0"), "ppo", (), ["ppo"]),
        (("trl==0.15.2", "transformers==4.48.3"), "", ("ddp",), ["grpo", "ppo"]),
        (("trl==1.15.0", "transformers==5.23.0"), "", (), ["grpo"]),
    ],
)
def test_no_recommended_cell_of_the_evidence_lacks_the_trainer(
    pins: tuple[str, ...], trainer: str, strategies: tuple[str, ...], prefixes: list[str]
) -> None:
    found = ask(
        *pins,
        issues=list(known_issues.load().values()),
        cells=evidence.published().cells,
        strategies=strategies,
        trainer=trainer,
    )
    recommended = [*found.pins, *([found.fewest] if found.fewest else [])]
    assert recommended
    measured = {each.id: each for each in evidence.published().cells}
    for each in recommended:
        for prefix in prefixes:
            verdicts = {
                verdict
                for (name, subject, _), verdict in measured[each.cell.id].verdicts.items()
                if name.startswith(f"{prefix}-") and subject == "upstream"
            }
            assert verdicts - {Verdict.ABSENT}, (each.cell.id, prefix)
        for strategy in each.strategies if trainer else ():
            judged = {
                verdict
                for (name, subject, label), verdict in measured[each.cell.id].verdicts.items()
                if measured_with(name) == trainer and subject == "upstream" and kind(label) == strategy
            }
            assert judged - {Verdict.ABSENT, Verdict.UNTESTABLE}, (each.cell.id, strategy)


# What another trainer's known issues stop


def all_blockers(found: Diagnosis) -> set[str]:
    return {effect.blocked_by for each in found.issues for effect in each.effects if effect.blocked_by}


def test_what_issues_of_another_trainer_stop_is_judged_without_them() -> None:
    blocked = dataclasses.replace(predict("blocked", trl="<0.18"), by="grpo-one")
    for beneath, shown in (("silent", ["silent"]), ("ok", [])):
        shared = issue(blocked, predict(beneath), name="lora-one", strategies=("single",))
        verdicts = {("lora-one", "upstream", "single"): Verdict.ERROR}
        cells = [dataclasses.replace(cell("0.15.2"), verdicts=verdicts, attributed=False)]
        found = ask("trl==0.15.2", issues=[GRPO, shared], cells=cells, strategies=["single"], trainer="ppo")
        assert [effect.verdict.value for each in found.issues for effect in each.effects] == shown
        assert all_blockers(ask("trl==0.15.2", issues=[GRPO, shared], cells=cells)) == {"grpo-one"}


def test_a_cell_whose_failures_another_trainers_issue_explains_can_be_recommended() -> None:
    blocked = dataclasses.replace(predict("blocked", trl="==0.16.1"), by="grpo-one")
    shared = issue(blocked, predict("broken", trl="<0.16"), predict("ok"), name="lora-one", strategies=("single",))
    verdicts = {("lora-one", "upstream", "single"): Verdict.BLOCKED, ("ppo-one", "upstream", "single"): Verdict.OK}
    cells = [
        dataclasses.replace(cell("0.16.1"), verdicts=verdicts),
        dataclasses.replace(cell("1.0.0"), verdicts={("grpo-one", "upstream", "single"): Verdict.OK}),
    ]
    for trainer, recommended in (("ppo", "0.16.1"), ("grpo", "1.0.0")):
        issues = [GRPO, issue(predict("ok"), name="ppo-one"), shared]
        found = ask("trl==0.15.2", issues=issues, cells=cells, strategies=["single"], trainer=trainer)
        assert [pins.cell.versions["trl"] for pins in found.pins] == [recommended]


@pytest.mark.parametrize("trainer", ["grpo", "ppo"])
@pytest.mark.parametrize("trl", ["0.14.0", "0.15.2", "0.17.0", "1.5.0"])
def test_one_trainer_is_not_shown_the_others_issues_cures_or_blockers(trainer: str, trl: str) -> None:
    other = {"grpo": "ppo", "ppo": "grpo"}[trainer]
    found = ask(f"trl=={trl}", issues=list(known_issues.load().values()), trainer=trainer)
    assert found.issues
    assert not [name for name in all_blockers(found) if name.startswith(f"{other}-")]
    for each in found.issues:
        assert f"trainers.{other.upper()}Trainer" not in found.remedy(each)
        assert not each.issue.id.startswith(f"{other}-")
