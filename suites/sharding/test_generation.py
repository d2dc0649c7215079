"""How GRPO generates with sharded parameters: tokens, what is gathered, and DeepSpeed's hooks during and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo
from ..launches import Failures
from ..verdicts import failure_of, mean_over_ranks, of_resuming, same_at, unequal
from .memory import NO_GATHER, train
from .trainings import NO_SHARD

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache
    from ..settings.trainings import SettingTrainings
    from .trainings import Training, Trainings

SHARDED_ROOT = "'weight' must be 2-D"
NORM_TOLERANCE = 1e-4
"""Relative, of gradient norms."""
SIGNIFICANT = 1e-3
"""At least one norm is beyond it, so that equality says something."""
LEFT_BY_THE_ENGINE = 3
"""Hooks that are not the parameters': DeepSpeed keeps one to three on the root module, by its release."""
ALL = 100
"""Fewer than the tiny model's hooks when all are there: 133 to 135."""


@pytest.mark.known_issue("grpo-fsdp-generation")
@pytest.mark.parametrize("strategy", ["fsdp1", NO_SHARD, "fsdp2"])
def test_first_tokens(strategy: str, subject: str, judge: Judge, trained: Trainings) -> None:
    """GRPO generates beneath FSDP1's wrapper, and the root stays sharded (trl 2796).

    Right is: greedy generation before the first step gives the tokens that a single process gives, row by row.
    """

    def measure() -> Finding:
        alone, training = trained.single(subject, strategy), trained(subject, strategy)
        if not alone.first_tokens:
            return Finding(Verdict.ERROR, {"failure": alone.failure})
        evidence = {
            "failure": training.failure,
            **training.failures_of_other_ranks,
            "tokens": training.first_tokens,
            "tokens_single": alone.first_tokens,
        }
        return Finding(_of_first_tokens(training, alone), evidence)

    judge(measure, subject=subject, strategy=strategy)


@pytest.mark.known_issue("grpo-fsdp2-offload-generation")
def test_offloaded_parameters(subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    """Prompts are put where FSDP2 keeps offloaded parameters, on the host.

    Right is: GRPO trains as in a single process, see :mod:`suites.settings.equivalence`.
    """
    setting_trainings.judge_row(judge, subject, "fsdp2-offload_parameters")


@pytest.mark.known_issue("grpo-fsdp-compiled-generation")
@pytest.mark.on_demand
def test_compiled_policy(subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    """What ``torch.compile`` has made of FSDP1's root is asked to summon it.

    Right is: GRPO trains as in a single process, see :mod:`suites.settings.equivalence`.
    """
    setting_trainings.judge_row(judge, subject, "fsdp1-compiled")


@pytest.mark.known_issue("grpo-zero3-no-gather")
def test_without_gathering(subject: str, judge: Judge, launches: LaunchCache, layered_qwen2: TinyModel) -> None:
    """GRPO under ZeRO-3 with ``ds3_gather_for_generation=False``.

    Right is: the training that it is with the weights gathered to generate, which is TRL's default. With the same seed
    it generates the same tokens, so that the norms of its gradients are equal but for the order of sums.
    """

    def measure() -> Finding:
        ranks = train(launches, layered_qwen2, subject, NO_GATHER)
        failures = Failures.of([{"train": rank["failure"]} for rank in ranks])
        if failed := failure_of(judge.issue.id, failures.first):
            return Finding(failed, {"failures": failures.first, **failures.of_other_ranks})
        gathered = train(launches, layered_qwen2, subject, "zero3")
        if others := Failures.of([{"train": rank["failure"]} for rank in gathered]).first:
            return Finding(Verdict.ERROR, {"failures": others})
        evidence = {"grad_norm": ranks[0]["grad_norm"], "grad_norm_gathered": gathered[0]["grad_norm"]}
        assert max(evidence["grad_norm_gathered"]) > SIGNIFICANT, evidence
        right = evidence["grad_norm"] == pytest.approx(evidence["grad_norm_gathered"], rel=NORM_TOLERANCE)
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=NO_GATHER)


@pytest.mark.known_issue("grpo-zero3-optimizer")
def test_hooks_while_it_generates(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """Generation under ZeRO-3, and DeepSpeed's hooks during it (trl 2782).

    Right is: hooks lifted while it generates, in training and in evaluation, before, during and after; back afterwards;
    and the numbers of a single process. With the hooks in place DeepSpeed gathers every parameter again for every
    token.
    """

    def measure() -> Finding:
        ranks = grpo_runs("training", subject, "zero3").values
        alone = grpo_runs("single", "corrected", "single").values[0]["training"]
        failures = Failures.of([rank["failures"] for rank in ranks])
        evidence = {
            **_numbers_and_hooks(ranks, alone),
            "failures": failures.first,
            **failures.of_other_ranks,
            "hooks_in_loss": sorted(set(ranks[0]["hooks_in_loss"])),
        }
        return Finding(failure_of(judge.issue.id, failures.first) or _of_hooks(evidence), evidence)

    judge(measure, subject=subject, strategy="zero3")


@pytest.mark.known_issue("grpo-zero3-optimizer")
def test_unwrapping_the_bare_module(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """The same where ``unwrap_model_for_generation`` is given the module within the engine."""

    def measure() -> Finding:
        ranks = grpo_runs("training", subject, "zero3").values
        every = [{stage: rank["direct"][stage] for stage in ("before", "after")} for rank in ranks]
        failures = Failures.of(
            [{stage: unwrapping["failure"] for stage, unwrapping in direct.items()} for direct in every]
        )
        direct = every[0]
        evidence = {
            "hooks_before_during_after": {stage: unwrapping.get("hooks") for stage, unwrapping in direct.items()}
        }
        if failed := failure_of(judge.issue.id, failures.first):
            return Finding(failed, evidence | {"failures": failures.first, **failures.of_other_ranks})
        before, during, after = direct["after"]["hooks"]
        if before < ALL:  # training failed before there was an engine
            training = Failures.of([rank["failures"] for rank in ranks])
            return Finding(Verdict.ERROR, evidence | {"failures": training.first, **training.of_other_ranks})
        if after != before:
            return Finding(Verdict.SILENT, evidence)
        return Finding(Verdict.WASTEFUL if during > LEFT_BY_THE_ENGINE else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="zero3-direct")


@pytest.mark.known_issue("grpo-zero3-optimizer")
def test_resuming(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """The same of a training that goes on from its checkpoint."""

    def measure() -> Finding:
        return of_resuming(grpo_runs("resumed", subject, "zero3").values)

    judge(measure, subject=subject, strategy="zero3-resume")


@pytest.mark.known_issue("deepspeed-hook-registration")
def test_hooks_afterwards(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """The method that DeepSpeed 0.16.4 renamed (trl 2962).

    Right is: after each generation under ZeRO-3 all of DeepSpeed's hooks are there again, when the trainer generates
    (``zero3``) and when ``unwrap_model_for_generation`` is given the engine, as other trainers do (``zero3-direct``).
    """

    def measure() -> Finding:
        ranks = grpo_runs("training", subject, "zero3").values
        run, failures = ranks[0], Failures.of([rank["failures"] for rank in ranks])
        hooks = run["hooks_in_loss"]
        evidence = {
            "failures": failures.first,
            **failures.of_other_ranks,
            "hooks_in_loss": hooks,
            "hooks_at_the_end": run["hooks_at_the_end"],
        }
        # Other failures are other suites' matter.
        if failure_of(judge.issue.id, failures.first) is Verdict.BROKEN:
            return Finding(Verdict.BROKEN, evidence)
        # Training ended before its loss, or there is no engine.
        if not any(hooks):
            return Finding(Verdict.ERROR, evidence)
        back = set(hooks) == {run["hooks_at_the_end"]} and min(hooks) > ALL
        return Finding(Verdict.OK if back else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="zero3")


@pytest.mark.known_issue("deepspeed-hook-registration")
def test_unwrapping_the_engine(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """The same where ``unwrap_model_for_generation`` is given the engine."""

    def measure() -> Finding:
        every = [rank["direct"]["engine"] for rank in grpo_runs("training", subject, "zero3").values]
        first, failures = every[0], Failures.of([{"engine": rank["failure"]} for rank in every])
        if failed := failure_of(judge.issue.id, failures.first):
            return Finding(failed, {**first, "failure": failures.first["engine"], **failures.of_other_ranks})
        before, _during, after = first["hooks"]
        return Finding(Verdict.OK if before == after > ALL else Verdict.SILENT, first)

    judge(measure, subject=subject, strategy="zero3-direct")


@pytest.mark.known_issue("deepspeed-evaluate-before-train")
def test_training_after_an_evaluation(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """An evaluation under ZeRO-3, then training (transformers 44889).

    Right is: the evaluations and the training of a single process, and as many of DeepSpeed's hooks as without it.
    """

    def measure() -> Finding:
        ranks = grpo_runs("training", subject, "zero3", evaluate_first=True).values
        failures = Failures.of([rank["failures"] for rank in ranks])
        if failed := failure_of(judge.issue.id, failures.first):
            return Finding(failed, {"failures": failures.first, **failures.of_other_ranks})
        alone = grpo_runs("single", "corrected", "single").values[0]["training"]
        undisturbed = grpo_runs("training", subject, "zero3").values[0]
        hooks = {"hooks_without_evaluation": undisturbed["hooks_at_the_end"]}
        evidence = {**_numbers_and_hooks(ranks, alone), **hooks}
        return Finding(_of_evaluation_first(evidence), evidence)

    judge(measure, subject=subject, strategy="zero3")


def _of_first_tokens(training: Training, alone: Training) -> Verdict:
    if training.first_tokens:  # what failed afterwards is another matter
        return Verdict.OK if training.first_tokens == alone.first_tokens else Verdict.SILENT
    return Verdict.BROKEN if SHARDED_ROOT in (training.failure or "") else Verdict.ERROR


def _numbers_and_hooks(ranks: Sequence[Mapping[str, Any]], alone: Mapping[str, Any]) -> dict[str, Any]:
    """Evidence of a training under ZeRO-3 and of the one process that it must agree with."""
    first = ranks[0]
    return {
        "losses": mean_over_ranks([rank["losses"] for rank in ranks]),
        "losses_single": alone["losses"],
        **{key: first[key] for key in ("grad_norm", "eval_losses", "hooks_at_the_end")},
        "grad_norm_single": alone["grad_norm"],
        "eval_losses_single": alone["eval_losses"],
        "hooks_in_generation": {stage: sorted(set(hooks)) for stage, hooks in first["hooks_in_generation"].items()},
    }


def _agrees_with_one_process(evidence: Mapping[str, Any]) -> bool:
    assert len(evidence["losses"]) == grpo.STEPS
    return (
        not unequal(evidence["losses"], evidence["losses_single"])
        and not unequal(evidence["grad_norm"], evidence["grad_norm_single"], relative=True)
        and all(
            same_at(evidence["eval_losses"].get(when, {}), losses)
            for when, losses in evidence["eval_losses_single"].items()
        )
    )


def _of_hooks(evidence: Mapping[str, Any]) -> Verdict:
    whole = evidence["hooks_at_the_end"]
    if not _agrees_with_one_process(evidence) or whole < ALL or evidence["hooks_in_loss"] != [whole]:
        return Verdict.SILENT
    alive = max(max(hooks) for hooks in evidence["hooks_in_generation"].values())
    return Verdict.WASTEFUL if alive > LEFT_BY_THE_ENGINE else Verdict.OK


def _of_evaluation_first(evidence: Mapping[str, Any]) -> Verdict:
    # Before training the policy still is its reference, and advantages cancel out.
    if not _agrees_with_one_process(evidence) or not same_at(evidence["eval_losses"]["evaluate_before"], {0: 0.0}):
        return Verdict.SILENT
    extra = evidence["hooks_at_the_end"] - evidence["hooks_without_evaluation"]
    return Verdict.WASTEFUL if extra else Verdict.OK
