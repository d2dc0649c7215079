"""Whether a training under a strategy is that of one process, with the engine and the memory that were promised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge, Untestable

from ..in_rank import accumulation, adapters, settings
from ..in_rank.sharding import STEPS
from ..launches import Failures, distinct
from ..settings.table import row
from ..verdicts import failure_of
from .equivalence import GRAD_NORM_TOLERANCE, judge_equivalence
from .memory import STRATEGIES, judge_memory, train
from .trainings import NO_SHARD, WORLD_SIZE, built_as_asked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache
    from ..settings.trainings import SettingTrainings
    from .trainings import Trainings


@pytest.mark.known_issue("strategy-equivalence")
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_equivalence(strategy: str, subject: str, judge: Judge, trained: Trainings) -> None:
    """GRPO under a strategy is the training that it is in a single process.

    Right is: with the same seed, data and completions two steps of SGD, gradients clipped, give the same losses,
    gradient norms and weights; for tolerances and their reasons see :mod:`equivalence`. This catches silent bugs that
    nobody has named.
    """
    judge(lambda: judge_equivalence(trained, subject, strategy), subject=subject, strategy=strategy)


@pytest.mark.known_issue("grpo-fsdp-no-shard-gradients")
def test_accumulated_gradients(subject: str, judge: Judge, trained: Trainings) -> None:
    """Accumulated gradients are lost under FSDP1 ``NO_SHARD``.

    Right is: gradient norms and weights of two steps, each of two accumulated batches, are those of a single process.
    """
    judge(lambda: judge_equivalence(trained, subject, NO_SHARD), subject=subject, strategy=NO_SHARD)


FP32_SUMS: Mapping[str, Any] = {
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}
"""DeepSpeed's config, as a user who asks for float32 sums of bfloat16 gradients writes it."""
FP32_SUMS_TOLERANCE = 0.2
"""Of how far the weights have moved: bfloat16 weights round it; gradients of one rank alone are as far off as it is."""


@pytest.mark.known_issue("deepspeed-fp32-sums")
def test_float32_sums(
    subject: str, judge: Judge, launches: LaunchCache, tiny_qwen2: Callable[..., TinyModel], tmp_path: Path
) -> None:
    """ZeRO-1 in bfloat16 whose gradients are summed in float32 reduces a copy (deepspeed 7985).

    Right is: after two steps of a plain Trainer the weights are where SGD on the mean over both ranks puts them.
    """

    def measure() -> Finding:
        config = tmp_path / "deepspeed.json"
        config.write_text(json.dumps(FP32_SUMS))
        model = tiny_qwen2(initializer_range=0.3, num_hidden_layers=1)
        result = launches(
            accumulation.train,
            subject,
            model,
            accumulation.IN_BF16,
            strategy="zero1",
            options={"config": str(config)},
            sharded=False,
        )
        ranks = result.values
        failures = Failures.of([{"training": rank["failure"]} for rank in ranks])
        failed = failure_of(judge.issue.id, failures.first)
        if failed is not None:
            return Finding(failed, {"failures": failures.first, **failures.of_other_ranks})
        built_as_asked("zero1", result.ranks[0].proof["engines"], None)
        evidence = {name: value for name, value in ranks[0].items() if name != "failure"}
        right = evidence["moved"] < FP32_SUMS_TOLERANCE
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="zero1")


@pytest.mark.known_issue("fsdp2-grad-norm")
def test_logged_norms(subject: str, judge: Judge, trained: Trainings) -> None:
    """Under FSDP2 ``grad_norm`` is that of one rank's part (pytorch 170862).

    Right is: the logged norms of two steps are those of a single process, to the tolerance of :mod:`equivalence`.
    """

    def measure() -> Finding:
        alone, training = trained.single(subject, "fsdp2"), trained(subject, "fsdp2")
        failure = alone.failure or training.failure
        if failure is not None:
            return Finding(Verdict.ERROR, {"failure": failure, **training.failures_of_other_ranks})
        norms, expected = training.first["grad_norm"], alone.first["grad_norm"]
        assert len(expected) == STEPS
        right = norms == pytest.approx(expected, rel=GRAD_NORM_TOLERANCE)
        return Finding(Verdict.OK if right else Verdict.SILENT, {"grad_norm": norms, "grad_norm_single": expected})

    judge(measure, subject=subject, strategy="fsdp2")


@pytest.mark.known_issue("fsdp2-rounded-outputs")
def test_outputs_of_grpo(subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    """In mixed precision FSDP2 casts what a model returns to bfloat16.

    Right is: the trainer gets the outputs in the dtype in which the model has computed them: GRPO its logits or
    log-probabilities, a plain ``Trainer`` the loss.
    """
    label = "fsdp2-bf16"

    def measure() -> Finding:
        ranks, (alone,) = setting_trainings.ranks_and_one_process(subject, row(label), neighbours=False)
        losses = [sum(step) / len(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
        return _of_outputs(ranks, {"losses": losses, "losses_single": alone["losses"]})

    judge(measure, subject=subject, strategy=label)


@pytest.mark.known_issue("fsdp2-rounded-outputs")
def test_loss_of_a_plain_trainer(subject: str, judge: Judge, launches: LaunchCache, layered_qwen2: TinyModel) -> None:
    """The same of the loss that a plain ``Trainer`` gets."""
    label = "fsdp2-bf16_loss"

    def measure() -> Finding:
        result = launches(
            settings.outputs_of_plain_training,
            subject,
            layered_qwen2,
            strategy="fsdp2",
            world_size=WORLD_SIZE,
            sharded=False,
        )
        failures = [rank["failure"] for rank in result.values if rank["failure"]]
        built_as_asked("fsdp2", result.ranks[0].proof["engines"], failures[0] if failures else None)
        return _of_outputs(result.values, {"loss": result.values[0]["loss"]})

    judge(measure, subject=subject, strategy=label)


@pytest.mark.known_issue("fsdp-checkpointed-cache")
def test_checkpointed_cache(subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    """FSDP's activation checkpointing of a model with a cache.

    Right is: GRPO trains as in a single process, see :mod:`suites.settings.equivalence`.
    """
    setting_trainings.judge_row(judge, subject, "fsdp1-wrapper_checkpointing")


@pytest.mark.known_issue("deepspeed-unprepared-model")
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_engine_holds_the_policy(strategy: str, subject: str, judge: Judge, trained: Trainings) -> None:
    """A Trainer that does not give DeepSpeed the model that it trains.

    Right is: GRPO trains, and DeepSpeed's engine holds its policy. What it computes is the matter of
    ``strategy-equivalence``.
    """

    def measure() -> Finding:
        training = trained(subject, strategy)
        failures = {"train": training.failure} if training.failure else {}
        evidence = {"failures": failures, **training.failures_of_other_ranks, "engines": dict(training.engines)}
        if failed := failure_of(judge.issue.id, failures):
            return Finding(failed, evidence)
        return Finding(Verdict.OK if "deepspeed" in training.engines else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=strategy)


@pytest.mark.known_issue("grpo-deepspeed-config")
@pytest.mark.parametrize("strategy", ["zero2-optimizer", "zero3-optimizer", "zero2-scheduler", "zero3-scheduler"])
def test_optimizer_and_scheduler_of_a_config(strategy: str, subject: str, judge: Judge, trained: Trainings) -> None:
    """Optimizer and scheduler of a DeepSpeed config, and GRPO's reference model.

    Right is: they are the policy's alone, and the training is that of a single process with the same optimizer and
    learning rates; for tolerances and their reasons see :mod:`equivalence`. The config's values are ``auto``, as in the
    examples of Transformers' documentation.
    """

    def measure() -> Finding:
        training = trained(subject, strategy)
        failures = {"train": training.failure} if training.failure else {}
        if failed := failure_of(judge.issue.id, failures):
            return Finding(failed, {"failures": failures, **training.failures_of_other_ranks})
        finding = judge_equivalence(trained, subject, strategy)
        optimizer = training.first["ref_optimizer"]
        evidence = {**finding.evidence, "optimizer_of_reference": optimizer}
        wasted = finding.verdict is Verdict.OK and optimizer is not None
        return replace(finding, verdict=Verdict.WASTEFUL if wasted else finding.verdict, evidence=evidence)

    judge(measure, subject=subject, strategy=strategy)


@pytest.mark.known_issue("deepspeed-empty-param-group")
def test_adapter_without_biases(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    """A group of parameters that DeepSpeed drops and the scheduler counts.

    Right is: an adapter without biases, all of whose parameters have weight decay, trains under ZeRO-2, and every
    ``lora_B`` moves.
    """

    def measure() -> Finding:
        run = lora_runs(subject, "zero2")["config"]
        failed = failure_of(judge.issue.id, {"train": run["failure"]} if run["failure"] else {})
        if failed:
            return Finding(failed, run)
        moved = run["lora_b_moved"] == run["lora_b"] > 0 and not run["without_gradient"] and not run["frozen_moved"]
        return Finding(Verdict.OK if moved and len(run["losses"]) == adapters.STEPS else Verdict.SILENT, run)

    judge(measure, subject=subject, strategy="zero2")


@pytest.mark.known_issue("strategy-memory")
@pytest.mark.every_pair
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory(
    strategy: str, subject: str, judge: Judge, launcher: Launcher, launches: LaunchCache, deep_qwen2: TinyModel
) -> None:
    """What a rank of GRPO holds of its accelerator's memory, against what was promised.

    Right is: between steps, while it generates, in the reference model's forward pass, in the policy's forward and
    backward pass and at the peak of a step, a rank holds no more copies of the model than its strategy and its
    arguments promise. For the promises and their sources see :mod:`memory`; how memory is read is in
    :mod:`in_rank.memory`. The model is made so that its parameters, and not its activations, fill the memory;
    ``single`` shows that they do.
    """

    def measure() -> Finding:
        if launcher.device == "cuda":
            raise Untestable("on a GPU, what cuBLAS allocates for itself counts as well, and is as large as this model")
        return judge_memory(strategy, train(launches, deep_qwen2, subject, strategy))

    judge(measure, subject=subject, strategy=strategy)


def _of_outputs(ranks: Sequence[Mapping[str, Any]], evidence: Mapping[str, Any]) -> Finding:
    failures = distinct(rank["failure"] for rank in ranks)
    if failures:
        return Finding(Verdict.ERROR, {"failure": failures[0]})
    assert all(rank["computed"] for rank in ranks), "nothing has looked at what the model computed"
    right = all(rank["returned"] == rank["computed"] for rank in ranks)
    dtypes = {name: ranks[0][name] for name in ("computed", "returned")}
    return Finding(Verdict.OK if right else Verdict.SILENT, {**dtypes, **evidence})
