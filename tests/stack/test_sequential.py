"""Several trainings in one launch, of which ranks end one differently: it alone is lost, and no number is another's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.conformance import driver, sequential
from pytest_trlcompat.launch import Launcher, LaunchResult
from pytest_trlcompat.tiny import TinyModel
from suites.in_rank import models
from suites.launches import Tried, Turns

pytestmark = pytest.mark.skipif(
    tuple(map(int, stack.installed()["trl"].split(".")[:2])) < (1, 10), reason="planted into what the newest have"
)
ROWS: dict[str, dict[str, Any]] = {
    "before": {"learning_rate": 0.3},
    "broken": {"learning_rate": 0.25},
    "after": {"learning_rate": 0.2, "gradient_accumulation_steps": 2},
}
BOUND = 150.0
"""Seconds within which a fault must have ended, with every launch that it takes; on an idle machine ten are enough."""


def held(fault: str, on: Sequence[int], model: TinyModel, names: Sequence[str]) -> dict[str, Any]:
    """Trainings of SFT, of which that named ``broken`` fails in its second step on the ranks ``on``.

    Those of one alone need not wait for the other.
    """
    import trl

    if len(on) == 1:
        sequential.PATIENCE = 0.3
    compute_loss = trl.SFTTrainer.compute_loss
    rank = int(os.environ["RANK"])

    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(self, *args, **kwargs)
        if self.args.learning_rate == ROWS["broken"]["learning_rate"] and self.state.global_step == 1 and rank in on:
            if fault == "raise":
                raise ArithmeticError("planted")
            if fault == "elsewhere":
                raise [ArithmeticError, LookupError][rank]("planted")
            if fault == "mismatch":
                import torch

                mine = torch.zeros(13 + 3 * rank, device=loss.device)
                torch.distributed.all_gather_into_tensor(mine.repeat(2), mine)
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    trl.SFTTrainer.compute_loss = planted
    return driver.compare_with_reference("sft", "upstream", model, {name: ROWS[name] for name in names})


class Launches:
    """Launches of :func:`held`, which remember what they were asked for."""

    def __init__(self, launcher: Launcher, folder: Path, fault: str, on: Sequence[int], strategy: str = "ddp") -> None:
        self.launcher, self.fault, self.on, self.strategy = launcher, fault, on, strategy
        self.model = tiny.qwen2(initializer_range=0.3, num_hidden_layers=1, directory=folder)
        self.asked: list[Sequence[str]] = []
        launcher(models.save_model, self.model, strategy="single")

    def __call__(self, names: Sequence[str]) -> LaunchResult:
        self.asked.append(list(names))
        return self.launcher(
            *(held, self.fault, self.on, self.model, list(names)),
            strategy=self.strategy,
            sharded=False,
            check=False,
            raises="original",
        )

    def tried(self) -> dict[str, Tried]:
        started = time.monotonic()
        turns = Turns(ROWS)
        for names in turns:
            turns.judge(self(names))
        assert time.monotonic() - started < BOUND
        assert set(turns.tried) == set(ROWS)
        return turns.tried


def assert_trained(tried: Tried) -> None:
    """A training whose numbers are the reference's."""
    assert tried.error is None
    assert {rank["failure"] for rank in tried.ranks} == {None}
    assert (tried.ranks[0]["differences"], tried.ranks[0]["compared"] > 30) == ([], True)


def assert_lost(tried: Tried, rank: int) -> None:
    """The broken training: each answer says what it ended in, and where."""
    assert tried.error is None
    assert tried.ranks
    for each in tried.ranks:
        assert each["failure"].startswith("ArithmeticError: planted")
        assert each[sequential.FAILED_ON] == [rank]


@pytest.mark.fault(
    "Of several trainings in one launch one rank fails in one, while the others wait for it in a collective.",
    "The launch ends, that training has the exception and the rank, and the others their own numbers.",
)
@pytest.mark.parametrize("strategy, rank", [("ddp", 1), ("zero3", 1), ("fsdp2", 0)])
def test_one_rank_that_fails_alone_costs_its_training_alone(
    strategy: str, rank: int, launcher: Launcher, tmp_path: Path
) -> None:
    launches = Launches(launcher, tmp_path, "raise", [rank], strategy)
    found = launches.tried()
    first, second = launches.asked
    # Where the other rank is not freed from its collective, its answers are lost with it.
    assert (first, second) in [(list(ROWS), ["after"]), (list(ROWS), ["before", "after"])]
    assert_trained(found["before"])
    assert_trained(found["after"])
    assert_lost(found["broken"], rank)


def test_ranks_that_fail_at_the_same_place_go_on_together(launcher: Launcher, tmp_path: Path) -> None:
    launches = Launches(launcher, tmp_path, "raise", [0, 1])
    found = launches.tried()
    assert launches.asked == [list(ROWS)]
    assert_trained(found["before"])
    assert_trained(found["after"])
    for each in found["broken"].ranks:
        assert each["failure"].startswith("ArithmeticError: planted")
        assert sequential.FAILED_ON not in each


def test_what_ranks_sent_in_a_collective_that_failed_does_not_reach_the_next_training(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Gloo ends a process that receives what it has not asked for: the training after would have been called broken."""
    launches = Launches(launcher, tmp_path, "mismatch", [0, 1])
    found = launches.tried()
    assert launches.asked == [list(ROWS), ["after"]]
    assert_trained(found["before"])
    assert_trained(found["after"])
    assert found["broken"].error is None
    assert ["Detected mismatch between collectives" in each["failure"] for each in found["broken"].ranks] == [True] * 2


def test_ranks_that_fail_at_different_places_do_not_go_on(launcher: Launcher, tmp_path: Path) -> None:
    launches = Launches(launcher, tmp_path, "elsewhere", [0, 1])
    found = launches.tried()
    assert launches.asked == [list(ROWS), ["after"]]
    assert_trained(found["before"])
    assert_trained(found["after"])
    assert [each["failure"].partition(":")[0] for each in found["broken"].ranks] == ["ArithmeticError"] * 2
    assert [each[sequential.FAILED_ON] for each in found["broken"].ranks] == [[0, 1]] * 2


def test_a_rank_that_dies_costs_its_training_and_is_named(launcher: Launcher, tmp_path: Path) -> None:
    launches = Launches(launcher, tmp_path, "killed", [1])
    found = launches.tried()
    assert launches.asked == [list(ROWS), ["before", "after"]]
    assert_trained(found["before"])
    assert_trained(found["after"])
    assert found["broken"].ranks == ()
    error = str(found["broken"].error)
    assert "first observed failure: rank 1 was killed by SIGKILL" in error
    assert error.endswith("rank 0 was in 'broken'\nrank 1 was in 'broken'")
