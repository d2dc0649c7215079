"""What GRPO's evaluations give: that they run, their loss over all rows, and metrics that are not training's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo
from ..measured import every
from ..sharding.equivalence import SIGNIFICANT
from ..verdicts import LOSS_TOLERANCE, failure_of, unequal

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult

    from ..sharding.trainings import Trainings

COMPARED = ("reward", "kl")


@pytest.mark.known_issue("grpo-evaluate")
def test_evaluation(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """trl 0.14.0 cannot evaluate, since Transformers takes its prompts for tensors.

    Right is: an evaluation in training, and the same loss from one that is called after it, where no step lies between.
    """

    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["training"]
        failed = failure_of(judge.issue.id, run["failures"])
        if failed:
            return Finding(failed, {"failures": run["failures"]})
        during, after = (list(run["eval_losses"][when].values()) for when in ("train", "evaluate_after"))
        right = len(during) == grpo.STEPS and all(math.isfinite(loss) and loss > 0 for loss in during)
        verdict = Verdict.OK if right and not unequal(after, during[-1:]) else Verdict.SILENT
        return Finding(verdict, {"eval_losses": during, "eval_loss_after": after})

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-eval-accumulation")
def test_loss_with_accumulation(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """An evaluation's loss divided by the accumulated gradients (trl 4010, 4669).

    Right is: with gradient accumulation the loss of an evaluation is beta times its KL, and an evaluation can come
    before training.
    """

    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["evaluating"]
        # The evaluation before training has a test of its own.
        failures = {stage: text for stage, text in run["failures"].items() if stage != "evaluate_before"}
        failed = failure_of(judge.issue.id, failures)
        if failed:
            return Finding(failed, {"failures": failures})
        losses = [entry["eval_loss"] for entry in run["logs"]["train"] if "eval_loss" in entry]
        # Advantages cancel out in each group, which leaves the KL term of the loss. It is the corrected trainer's:
        # upstream's KL may be that of other rows (grpo-eval-metrics).
        right = grpo_runs("single", "corrected", "single").values[0]["evaluating"]
        expected = [right["beta"] * entry["eval_kl"] for entry in right["logs"]["train"] if "eval_kl" in entry]
        evidence = {"eval_losses": losses, "beta_times_kl": expected}
        assert len(losses) == grpo.STEPS
        return Finding(Verdict.SILENT if unequal(losses, expected) else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-eval-accumulation")
def test_before_training(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """The same of an evaluation before the first step, when the policy still is its reference: its loss is 0."""

    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["evaluating"]
        stages = ("construction", "evaluate_before")
        failures = {stage: text for stage, text in run["failures"].items() if stage in stages}
        failed = failure_of(judge.issue.id, failures)
        if failed:
            return Finding(failed, {"failures": failures})
        losses = [entry["eval_loss"] for entry in run["logs"]["evaluate_before"] if "eval_loss" in entry]
        return Finding(Verdict.SILENT if unequal(losses, [0.0]) else Verdict.OK, {"eval_losses": losses})

    judge(measure, subject=subject, strategy="single-before_training")


@pytest.mark.known_issue("grpo-eval-metrics")
def test_metrics(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """Metrics of evaluation among those of training, and the reverse (trl 3337).

    Right is: every evaluation logs its reward and a KL that goes with its loss, those of the same weights are the same,
    and the metrics of training are those of a training that was never evaluated. Advantages cancel out in each group,
    so that the loss of an evaluation is beta times its KL, whatever the weights.
    """

    def measure() -> Finding:
        runs = grpo_runs("single", subject, "single").values[0]
        evaluating, undisturbed = runs["evaluating"], runs["undisturbed"]
        # That the evaluation before training fails is a matter of grpo-eval-accumulation.
        failures = {stage: text for stage, text in evaluating["failures"].items() if stage != "evaluate_before"}
        failed = failure_of(judge.issue.id, failures | undisturbed["failures"])
        if failed:
            return Finding(failed, {"failures": failures | undisturbed["failures"]})
        evidence = {
            "training": _metrics(_of_training(evaluating), ""),
            "training_undisturbed": _metrics(_of_training(undisturbed), ""),
            "evaluations": _metrics(_of_evaluations(evaluating, "train"), "eval_"),
            "evaluation_after": _metrics(_of_evaluations(evaluating, "evaluate_after"), "eval_"),
        }
        return Finding(Verdict.OK if _right(evidence) else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-eval-remainder")
def test_loss_of_several_batches(subject: str, judge: Judge, trained: Trainings) -> None:
    """An evaluation that leaves out rows of its last batch.

    Right is: on several ranks, where one batch over all of them holds more rows than there are prompts, the loss of a
    single process; and in a single process the mean of the batches' losses, each as often as it has rows.
    """

    def measure() -> Finding:
        training = trained.single(subject, "single").first
        evaluation = training["evaluation_in_batches"]
        failure = training["failure"] or evaluation.get("failure")
        if failure is not None:
            return Finding(Verdict.ERROR, {"failure": failure})
        batches = evaluation["batches"]
        rows = [number for number, _ in batches]
        assert rows == [grpo.ROWS, grpo.ROWS // 2], "the last batch is half full"
        assert abs(batches[0][1] - batches[1][1]) > SIGNIFICANT, "else any weights would do"
        expected = sum(number * loss for number, loss in batches) / sum(rows)
        evidence = {"eval_loss": evaluation["loss"], "eval_loss_by_rows": expected, "batches": batches}
        return Finding(Verdict.SILENT if unequal([evaluation["loss"]], [expected]) else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-eval-remainder")
def test_loss_of_few_rows(subject: str, judge: Judge, trained: Trainings) -> None:
    """The same on two ranks, which hold more rows than there are prompts."""

    def measure() -> Finding:
        training = trained(subject, "ddp").first
        failure = training["failure"] or training["evaluation_of_part"].get("failure")
        if failure is not None:
            return Finding(Verdict.ERROR, {"failure": failure})
        expected = trained.single("corrected", "ddp").first["evaluation_of_part"]["loss"]
        assert expected > SIGNIFICANT
        loss = training["evaluation_of_part"]["loss"]
        evidence = {"eval_loss": loss, "eval_loss_single": expected}
        return Finding(Verdict.SILENT if unequal([loss], [expected]) else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="ddp")


def _of_training(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in run["logs"]["train"] if "loss" in entry]


def _of_evaluations(run: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    return [entry for entry in run["logs"][stage] if "eval_loss" in entry]


def _metrics(entries: list[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    return [{name: entry.get(prefix + name) for name in ("loss", *COMPARED)} for entry in entries]


def _right(evidence: dict[str, Any]) -> bool:
    evaluations, after = evidence["evaluations"], evidence["evaluation_after"]
    assert len(evaluations) == grpo.STEPS
    entries = [*evidence["training"], *evidence["training_undisturbed"], *evaluations, *after]
    if any(entry[name] is None for entry in entries for name in COMPARED) or len(after) != 1:
        return False
    # All evaluations see the same completions.
    same_rewards = every(abs(entry["reward"] - after[0]["reward"]) <= LOSS_TOLERANCE for entry in evaluations)
    same_weights = abs(after[0]["kl"] - evaluations[-1]["kl"]) <= LOSS_TOLERANCE
    return same_rewards and same_weights and _equal(evidence["training"], evidence["training_undisturbed"])


def _equal(entries: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(entries) == len(expected) and every(
        abs(left[name] - right[name]) <= LOSS_TOLERANCE
        for left, right in zip(entries, expected, strict=True)
        for name in COMPARED
    )
