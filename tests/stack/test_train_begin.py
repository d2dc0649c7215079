"""What bites a training is said when it begins: by the callback, by cured trainers, and of any trainer of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher
from pytest_trlcompat.launch.beginnings import NAME

from .train_begin_bodies import agreement, said, train_plainly

pytest.importorskip("trl")

DROPOUT = "dpo-attention-dropout"


class _Kept:
    active = True

    def __init__(self) -> None:
        self.results: list[Any] = []

    def __call__(self, result: Any, failed: BaseException | None) -> None:
        self.results.append(result)


@pytest.fixture
def relayed(launch: Launcher) -> Iterator[_Kept]:
    kept = _Kept()
    launch.relay = kept
    yield kept
    launch.relay = None


@pytest.mark.parametrize("how", ["callback", "cured", "both"])
def test_it_is_said_once(launch: Launcher, tmp_path: Path, how: str) -> None:
    """The issue has no cure, so that a cured trainer has it as well."""
    assert launch(said, str(tmp_path), how, twice=True, strategy="single").values[0].count(DROPOUT) == 1


def test_it_is_seen_of_any_trainer_and_nothing_is_logged(launch: Launcher, relayed: _Kept, tmp_path: Path) -> None:
    launch(train_plainly, str(tmp_path), 0.1, strategy="ddp")
    launch(train_plainly, str(tmp_path), 0.0, strategy="ddp")
    named = [
        [[record[NAME] for record in rank.records if NAME in record] for rank in result.ranks]
        for result in relayed.results
    ]
    assert [(DROPOUT in main, others) for main, others in named] == [(True, []), (False, [])]


def test_it_is_what_the_doctor_says_of_the_training_without_what_is_cured(launch: Launcher, tmp_path: Path) -> None:
    here, doctors, cured = launch(agreement, str(tmp_path), strategy="single").values[0]
    assert here == doctors
    assert cured <= here
