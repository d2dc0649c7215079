"""Whether GRPO trains, and by what its loss, its gradient and its advantages are divided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge

from ..in_rank import grpo, grpo_advantages, grpo_steps
from ..measured import every
from ..verdicts import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.launch import LaunchResult
    from pytest_trlcompat.tiny import TinyModel

NO_SYNC_REFUSED = "no_sync context manager is incompatible with gradient partitioning"
ACCUMULATING = ("grpo", "bnpo", "dapo", "num_iterations")
TOLERANCE = 1e-5
"""Of advantages around 1, in float32."""


@pytest.mark.known_issue("grpo-needs-triton")
def test_without_triton(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """trl 1.15.0 cannot train where Triton is not installed.

    Right is: a training that goes through, with the loss of a policy that still is its reference at its first step.
    """

    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["undisturbed"]
        if failed := failure_of(judge.issue.id, run["failures"]):
            return Finding(failed, {"failures": run["failures"]})
        evidence = {"losses": run["losses"]}
        return Finding(Verdict.OK if abs(run["losses"][0]) < 1e-5 else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-warnings-issued")
def test_construction(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """GRPO's constructor writes to a dictionary that models no longer have.

    Right is: the trainer is built and takes all its steps.
    """

    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["undisturbed"]
        construction = {stage: text for stage, text in run["failures"].items() if stage == "construction"}
        if failed := failure_of(judge.issue.id, construction):
            return Finding(failed, {"failures": construction})
        if subject == "corrected":
            assert len(run["losses"]) == grpo.STEPS * run["accumulated"], run
        return Finding(Verdict.OK, {"failures": run["failures"]})

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-gradient-accumulation")
def test_accumulation_in_one_process(
    subject: str, judge: Judge, launch_once: Callable[..., list[Any]], saved_qwen2: TinyModel
) -> None:
    """How the gradient is divided (trl 2617, transformers 35207, 35808).

    Two optimizer steps over two micro-batches each: every weight must move as the objective over all their completions
    says, and the loss that is reported must be that objective.
    """

    def measure() -> Finding:
        (measured,) = launch_once(grpo_steps.steps, subject, saved_qwen2, grpo_steps.ALONE, strategy="single")
        return _of_accumulation({name: measured[name] for name in ACCUMULATING})

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-gradient-accumulation")
def test_accumulation_under_zero2(
    subject: str, judge: Judge, launch_once: Callable[..., list[Any]], saved_qwen2: TinyModel
) -> None:
    """The same on two ranks, where DeepSpeed divides as well."""

    def measure() -> Finding:
        measured = launch_once(grpo_steps.steps, subject, saved_qwen2, grpo_steps.RANKS, strategy="zero2")
        return _of_accumulation(measured[0])

    judge(measure, subject=subject, strategy="zero2")


@pytest.mark.known_issue("grpo-token-normalizer")
@pytest.mark.parametrize("variant", ["steps_per_generation", "truncated"])
def test_token_normalizer(
    variant: str, subject: str, judge: Judge, launch_once: Callable[..., list[Any]], saved_qwen2: TinyModel
) -> None:
    """By how many tokens ``dapo``, TRL's default loss, divides (trl 5619, 6439).

    An optimizer step must divide by the tokens that count of the generation, times the share of it that the step trains
    on: where ``steps_per_generation`` is not ``gradient_accumulation_steps``, and where truncated completions do not
    count.
    """

    def measure() -> Finding:
        (measured,) = launch_once(grpo_steps.steps, subject, saved_qwen2, grpo_steps.ALONE, strategy="single")
        run = measured[variant]
        if "absent" in run:
            raise Absent(run["absent"])
        if "failure" in run:
            return Finding(Verdict.ERROR, run)
        return Finding(Verdict.SILENT if grpo_steps.wrong_numbers(run) else Verdict.OK, run)

    judge(measure, subject=subject, strategy=f"single-{variant}")


@pytest.mark.known_issue("grpo-scale-rewards")
@pytest.mark.parametrize("scale", grpo_advantages.SCALES)
def test_scale_rewards(
    scale: str, subject: str, judge: Judge, launch_once: Callable[..., list[Any]], saved_qwen2: TinyModel
) -> None:
    """Advantages are divided where they must not be, or the other way round (trl 3991).

    ``scale_rewards`` says by which deviation of the rewards GRPO divides its advantages: of their group, of the batch,
    or by none. In trl 0.22.0 and 0.22.1 the default ``group`` divides by none, and ``none`` and ``batch`` by the
    group's.
    """

    def measure() -> Finding:
        (measured,) = launch_once(grpo_advantages.advantages, subject, saved_qwen2, strategy="single")
        run = measured[scale]
        if "absent" in run:
            raise Absent(run["absent"])
        if "failure" in run:
            return Finding(Verdict.ERROR, run)
        pairs = zip(run["found"], run["expected"], strict=True)
        right = every(abs(advantage - expected) <= TOLERANCE * max(1.0, abs(expected)) for advantage, expected in pairs)
        return Finding(Verdict.OK if right else Verdict.SILENT, run)

    judge(measure, subject=subject, strategy="single" if scale == "group" else f"single-{scale}")


def _of_accumulation(runs: dict[str, dict[str, Any]]) -> Finding:
    assert "absent" not in runs["grpo"], "every release can accumulate gradients"
    verdicts = [_verdict(run) for run in runs.values() if "absent" not in run]
    worst = next((verdict for verdict in verdicts if verdict is not Verdict.OK), Verdict.OK)
    return Finding(worst, runs)


def _verdict(run: dict[str, Any]) -> Verdict:
    if "failure" in run:
        return Verdict.BROKEN if NO_SYNC_REFUSED in run["failure"] else Verdict.ERROR
    return Verdict.SILENT if grpo_steps.wrong_numbers(run) else Verdict.OK
