"""What is said of a training where the catalogue, or the stack, leaves something open."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from pytest_trlcompat.catalog.evidence import Evidence
from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.measurements import Measurements
from pytest_trlcompat.doctor.requirements import of_pins
from pytest_trlcompat.doctor.stack_spec import of_mentions
from pytest_trlcompat.doctor.training_diagnosis import TrainingDiagnosis, diagnose_training
from pytest_trlcompat.training.errors import TrainingError
from pytest_trlcompat.training.training import Training

from .made_up import issue, predict

BROKEN = predict("broken", trl="<0.18")
CHECKPOINTED = dataclasses.replace(issue(BROKEN, predict("ok")), when={"gradient_checkpointing": True})
ON = Training("sft", {"gradient_checkpointing": True, "parallel.strategy": "single"})


def _ask(known: KnownIssue, training: Training, *pins: str, strategies: Sequence[str] = ()) -> TrainingDiagnosis:
    catalog = Catalog({known.id: known})
    spec = of_mentions(of_pins(pins), "the command line", complete=False)
    return diagnose_training(spec, catalog, Measurements.of(catalog, Evidence("2026-11-21", ())), training, strategies)


def _answer(known: KnownIssue, training: Training, *pins: str) -> tuple[str, tuple[str, ...]]:
    diagnosis = _ask(known, training, *pins)
    if diagnosis.bite:
        return "bites", diagnosis.bite[0].answer.because
    return ("may", diagnosis.may[0].answer.look) if diagnosis.may else ("clear", diagnosis.clear)


def test_what_is_stated_and_predicted_bites() -> None:
    because = ("parallel.strategy='single'", "activation_checkpointing=True")
    assert _answer(CHECKPOINTED, ON, "trl==0.17.0") == ("bites", because)
    assert _ask(CHECKPOINTED, ON, "trl==0.17.0").bite[0].since == "trl <0.18"


def test_with_releases_that_are_right_it_does_not() -> None:
    assert _answer(CHECKPOINTED, ON, "trl==0.18.0") == ("clear", ("one",))


def test_with_another_value_it_does_not() -> None:
    off = Training("sft", {"gradient_checkpointing": False})
    assert _answer(CHECKPOINTED, off, "trl==0.17.0") == ("clear", ("one",))


def test_what_nobody_predicts_for_the_stack_is_never_clear() -> None:
    unpredicted = dataclasses.replace(CHECKPOINTED, predictions=(BROKEN,))
    assert _answer(unpredicted, ON, "trl==0.18.0") == ("may", ("nothing is predicted for this stack",))


def test_a_version_that_is_not_said_leaves_it_open() -> None:
    assert _answer(CHECKPOINTED, ON, "transformers==4.50.0") == ("may", ("only with trl <0.18",))


def test_an_issue_without_conditions_is_open() -> None:
    look = ("whether you see this: wrong",)
    assert _answer(issue(BROKEN, predict("ok")), ON, "trl==0.17.0") == ("may", look)


def test_the_strategy_that_a_user_says_counts() -> None:
    unsaid = Training("sft", {"gradient_checkpointing": True})
    assert len(_ask(CHECKPOINTED, unsaid, "trl==0.17.0").may) == 1
    assert len(_ask(CHECKPOINTED, unsaid, "trl==0.17.0", strategies=["zero3"]).bite) == 1
    assert len(_ask(CHECKPOINTED, unsaid, "trl==0.17.0", strategies=["ddp"]).clear) == 1


def test_a_training_without_a_trainer_is_refused() -> None:
    with pytest.raises(TrainingError, match="a training with its trainer was expected"):
        _ask(CHECKPOINTED, Training(), "trl==0.17.0")
