"""Which known issues bite a training: by the rows that show them, by what their entries state, by their variants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.doctor.biting import VARIANTS, bites
from pytest_trlcompat.strategies import parts_of
from pytest_trlcompat.training.answers import Answer, Bite
from pytest_trlcompat.training.conditions import check, no_defaults
from pytest_trlcompat.training.training import Training

CATALOG = known_issues.load()
BITES, OPEN, NOT = Bite.BITES, Bite.CANNOT_TELL, Bite.DOES_NOT


def _answer(issue: str, labels: list[str], values: Mapping[str, Any]) -> Answer:
    known = CATALOG[issue]
    trainer = known.trainer or "trainer"
    return bites(known, labels, Training(trainer, values, whole=True), no_defaults)


@pytest.mark.parametrize(
    ("issue", "labels", "values", "bite"),
    [
        # a row of one thing, which the entry states
        ("dpo-attention-dropout", ["single-dropout"], {"model.attention_dropout": True}, BITES),
        ("dpo-attention-dropout", ["single-dropout"], {"model.attention_dropout": False}, NOT),
        ("dpo-attention-dropout", ["single-dropout"], {}, OPEN),
        # a value that is refused nowhere: near to it, it cannot be told
        ("dpo-robust-half", ["single-refused_robust"], {"loss_type": "robust", "label_smoothing": 0.5}, BITES),
        ("dpo-robust-half", ["single-refused_robust"], {"loss_type": "robust", "label_smoothing": 0.1}, OPEN),
        ("dpo-robust-half", ["single-refused_robust"], {"loss_type": "ipo", "label_smoothing": 0.5}, NOT),
        # a row of several things, of which the entry states none
        (
            "dpo-weighted-likelihood",
            ["single-use_weighting_hinge"],
            {"use_weighting": True, "loss_type": "hinge"},
            BITES,
        ),
        ("dpo-weighted-likelihood", ["single-use_weighting_hinge"], {"use_weighting": True, "loss_type": "ipo"}, OPEN),
        ("dpo-weighted-likelihood", ["single-use_weighting_hinge"], {"use_weighting": False, "loss_type": "ipo"}, NOT),
        # what one process computes wrongly, ranks do as well; another strategy of ranks is not known
        (
            "dpo-attention-dropout",
            ["single-dropout"],
            {"model.attention_dropout": True, "parallel.strategy": "zero3"},
            BITES,
        ),
        ("grpo-images-gathered", ["ddp-images_mixed_ddp"], {"parallel.strategy": "single"}, NOT),
        ("grpo-images-gathered", ["ddp-images_mixed_ddp"], {"parallel.strategy": "zero3"}, OPEN),
        # what an entry states by hand
        ("lora-fsdp-save", ["fsdp1"], {"parallel.strategy": "fsdp1", "adapter.type": "lora"}, BITES),
        ("lora-fsdp-save", ["fsdp1"], {"parallel.strategy": "fsdp2", "adapter.type": "lora"}, NOT),
        ("lora-fsdp-save", ["fsdp1"], {"parallel.strategy": "fsdp1", "adapter.type": None}, NOT),
        ("lora-fsdp-save", ["fsdp1"], {"parallel.strategy": "fsdp1"}, OPEN),
        # variants of labels
        (
            "grpo-zero3-no-gather",
            ["zero3-no_gather"],
            {"parallel.strategy": "zero3", "ds3_gather_for_generation": False},
            BITES,
        ),
        (
            "grpo-zero3-no-gather",
            ["zero3-no_gather"],
            {"parallel.strategy": "zero3", "ds3_gather_for_generation": True},
            NOT,
        ),
        # nothing says under which settings it shows
        ("strategy-memory", ["zero3"], {"parallel.strategy": "zero3"}, OPEN),
        ("strategy-memory", ["zero3"], {"parallel.strategy": "single"}, NOT),
        # a package that the training does not use
        ("grpo-vllm-weights", ["single"], {"use_vllm": False, "parallel.strategy": "single"}, NOT),
    ],
)
def test_whether_an_issue_bites(issue: str, labels: list[str], values: dict[str, Any], bite: Bite) -> None:
    assert _answer(issue, labels, values).bite is bite


def test_what_another_issue_stops_cannot_be_told() -> None:
    training = Training("dpo", {"model.attention_dropout": True})
    answer = bites(
        CATALOG["dpo-attention-dropout"], ["single-dropout"], training, no_defaults, "another stops it first"
    )
    assert answer == Answer(OPEN, (), ("another stops it first",))


def test_without_a_label_that_shows_it_nothing_bites() -> None:
    assert _answer("dpo-attention-dropout", [], {"model.attention_dropout": True}).bite is NOT


def test_of_a_training_of_which_nothing_is_known_nothing_is_denied_but_by_what_its_source_says() -> None:
    """Without a condition that is contradicted an issue is never said not to bite."""
    denied = [
        issue.id
        for issue in CATALOG.values()
        if not issue.is_search
        and issue.labels()
        and bites(issue, issue.labels(), Training(issue.trainer or "trainer"), no_defaults).bite is NOT
    ]
    assert denied == []


def test_every_stated_condition_means_something() -> None:
    stated = [issue for issue in CATALOG.values() if issue.when is not None]
    assert len(stated) >= 60
    for issue in stated:
        assert issue.when is not None
        check(issue.when)


def test_every_variant_is_a_word_of_some_label() -> None:
    words = {word for issue in CATALOG.values() for label in issue.labels() for word in parts_of(label)[2].split("-")}
    assert sorted(set(VARIANTS) - words) == []
    for condition in VARIANTS.values():
        check(condition)
