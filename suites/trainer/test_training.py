"""What every trainer needs: imports, arguments, accumulation, resuming, and a teacher next to the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import accumulation, distillation, grpo
from ..launches import Failures
from ..sharding.trainings import built_as_asked
from ..verdicts import failure_of, of_resuming

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher, LaunchResult
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

TOLERANCE = 1e-3
"""Of a distance to how far the weights have moved: some hundred times the rounding of a weight that moves by a tenth of
its gradient. A micro-batch that is lost, or counts twice, shows by a third and more."""
TEACHER_TOLERANCE = 1e-4
"""Relative; newer releases of Transformers log four digits and more, and sums are made in another order."""


@pytest.mark.known_issue("trl-import")
def test_import(subject: str, judge: Judge, launcher: Launcher) -> None:
    """A release of TRL that cannot be imported with a newer Transformers.

    Neither package declares the limit, so that pip installs the two side by side.
    """

    def measure() -> Finding:
        result = launcher(import_trainer, subject, strategy="single")
        return Finding(Verdict.OK, {"module": result.values[0]})

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("trl-training-arguments")
@pytest.mark.parametrize("subject", ["upstream"])
def test_plain_training_arguments(subject: str, judge: Judge, launcher: Launcher) -> None:
    """Importing TRL's ``GRPOConfig`` breaks every plain ``TrainingArguments``.

    Right is: ``transformers.TrainingArguments`` can be made after ``trl.GRPOConfig`` was imported. The corrected
    trainer imports ``GRPOConfig`` as any user does, and does not touch Transformers: there is upstream alone to be
    judged.
    """

    def measure() -> Finding:
        (steps,) = launcher(make_training_arguments, strategy="single").values
        return Finding(Verdict.OK if steps == 3 else Verdict.SILENT, {"max_steps": steps})

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("trainer-accumulation")
@pytest.mark.parametrize("strategy", load()["trainer-accumulation"].strategies)
def test_accumulation(strategy: str, subject: str, judge: Judge, launches: LaunchCache, saved_qwen2: TinyModel) -> None:
    """Any Trainer's step over several micro-batches is not that of their mean.

    Right is: after two steps of two micro-batches, with a loss that is a mean of its micro-batch, every weight is where
    plain SGD on the mean of all micro-batches and ranks puts it.
    """

    def measure() -> Finding:
        # One that fails may have built no engine; of one that has trained it is asked below.
        result = launches(accumulation.train, subject, saved_qwen2, strategy=strategy, sharded=False)
        ranks, engines = result.values, result.ranks[0].proof["engines"]
        failures = Failures.of([{"training": rank["failure"]} for rank in ranks])
        failed = failure_of(judge.issue.id, failures.first)
        if failed is not None:
            return Finding(failed, {"failures": failures.first, **failures.of_other_ranks})
        built_as_asked(strategy, engines, None)
        assert engines or strategy == "single", f"{strategy} was asked for, and no engine was built"
        evidence = {name: value for name, value in ranks[0].items() if name != "failure"}
        right = evidence["moved"] < TOLERANCE
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=strategy)


@pytest.mark.known_issue("transformers-resume")
def test_resuming(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """A training cannot go on from its checkpoint (transformers 34631).

    Right is: the losses and gradient norms of a training that was never interrupted.
    """

    def measure() -> Finding:
        return of_resuming(grpo_runs("resumed", subject, "zero3").values)

    judge(measure, subject=subject, strategy="zero3")


@pytest.mark.known_issue("distillation-fsdp-teacher")
@pytest.mark.parametrize("strategy", load()["distillation-fsdp-teacher"].strategies)
def test_distillation(strategy: str, subject: str, judge: Judge, launches: LaunchCache, saved_qwen2: TinyModel) -> None:
    """The teacher of a distillation stays on the CPU under FSDP.

    Right is: losses and entropies are those of one process, whatever the strategy.
    """

    def measure() -> Finding:
        ranks = launches(distillation.train, subject, saved_qwen2, strategy=strategy).values
        failures = Failures.of([{"training": rank["failure"]} for rank in ranks])
        failed = failure_of(judge.issue.id, failures.first)
        if failed is not None:
            return Finding(failed, {**ranks[0], "failures": failures.first, **failures.of_other_ranks})
        (alone,) = launches(distillation.train, subject, saved_qwen2, strategy="single").values
        assert alone["failure"] is None, alone["failure"]
        evidence = {**ranks[0], "alone": {name: alone[name] for name in ("losses", "entropies")}}
        assert len(alone["losses"]) == 3
        assert alone["losses"][0] > 10 * TEACHER_TOLERANCE, "there is nothing to learn from the teacher"
        same = all(
            rank[name] == pytest.approx(alone[name], rel=TEACHER_TOLERANCE)
            for rank in ranks[:1]
            for name in ("losses", "entropies")
        )
        return Finding(Verdict.OK if same else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=strategy)


def import_trainer(subject: str) -> str:
    """Import the trainer in a rank, and return the name of its module."""
    return grpo.trainer_class(subject).__module__


def make_training_arguments() -> int:
    import tempfile

    from transformers import TrainingArguments
    from trl.trainer.grpo_config import GRPOConfig

    assert issubclass(GRPOConfig, TrainingArguments)
    return int(TrainingArguments(tempfile.mkdtemp(prefix="trlcompat-"), max_steps=3, report_to="none").max_steps)
