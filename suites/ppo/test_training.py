"""Whether PPO trains as it should: schedules, updates, adapters, accumulation, sharded roll-outs, and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.conformance.ppo import objects as ppo
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge, Untestable

from ..in_rank import ppo_memory, ppo_stages
from ..in_rank.ppo_adapters import REFERENCES, adapter_trainings
from ..sharding.memory import STRATEGIES, judge_memory
from ..sharding.trainings import greatest_difference
from .runs import TOLERANCE, greatest_difference_of_logs, require_ppo, saves_verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache
    from .runs import PPORuns

WEIGHT_TOLERANCE = 1e-5
"""Absolute, of moves up to 0.1 and more: some hundred times the rounding of a weight of 1."""
SIGNIFICANT = 1e-2
"""How far weights must move, so that equality says something."""
UNCLIPPED = {"gradient_clipping": 0.0}
"""As PPO is everywhere but under DeepSpeed."""
COPY, OFF = REFERENCES


@pytest.mark.known_issue("ppo-lr-scheduler-zip")
def test_learning_rate_scheduler(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    """PPO's learning rate scheduler steps, though DeepSpeed took a group out.

    Right is: it trains, and the whole policy moves.
    """

    def measure() -> Finding:
        run = ppo_runs(subject, "zero2")
        failed = run.failed(["construct_again", "train"], judge.issue)
        if failed is not None:
            return failed
        return Finding(Verdict.OK if run.trained else Verdict.SILENT, {"log": run.log, "moved": run.moved_tensors})

    judge(measure, subject=subject, strategy="zero2")


@pytest.mark.known_issue("ppo-stale-trace")
def test_one_update_per_batch(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    """A record of modules that were numbered anew (trl 2304, deepspeed 8043).

    Right is: PPO trains under ZeRO-3 on one update per batch, and the numbers of each step are those of the same
    trainer under DistributedDataParallel.
    """

    def measure() -> Finding:
        run = ppo_runs(subject, "zero3")
        failed = run.failed(["construct_again", "train"], judge.issue)
        if failed is not None:
            return failed
        difference = run.difference(ppo_runs(subject, "ddp"))
        right = run.trained and difference <= TOLERANCE
        evidence = {"max_difference_to_ddp": difference, "log": run.log}
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="zero3")


@pytest.mark.known_issue("ppo-fsdp-rollout")
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_rollout_under_fsdp(strategy: str, subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    """PPO generates, scores, trains and saves under FSDP1 and FSDP2.

    Right is: the numbers of each step are those of DistributedDataParallel, the policy is sharded, and what a fresh
    process reads of each save is bitwise the gathered policy.
    """

    def measure() -> Finding:
        run = ppo_runs(subject, strategy)
        failed = run.failed(["construct", "train"], judge.issue)
        if failed is not None:
            return failed
        ppo_runs.read_back(subject, strategy)
        engine = run.engines[strategy]
        evidence = run.evidence(ppo_stages.SAVES) | {
            "max_difference_to_ddp": run.difference(ppo_runs(subject, "ddp")),
            "sharded": engine["local"] < engine["total"],
            "log": run.log,
        }
        right = evidence["trained"] and evidence["sharded"] and evidence["max_difference_to_ddp"] <= TOLERANCE
        saved = saves_verdict(run, ppo_stages.SAVES, judge.issue)
        return Finding(saved if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=strategy)


@pytest.mark.known_issue("ppo-gradient-accumulation")
def test_gradient_accumulation(
    subject: str, judge: Judge, launch_once: Callable[..., list[Any]], saved_qwen2: TinyModel
) -> None:
    """PPO's gradient over micro-batches under DeepSpeed (DeepSpeed 7718).

    Right is: a batch in two micro-batches moves every weight as the whole batch does under DDP, without DeepSpeed.
    """

    def measure() -> Finding:
        require_ppo()
        whole = launch_once(ppo_stages.accumulated, "corrected", saved_qwen2, 1, strategy="ddp")[0]
        parts = launch_once(ppo_stages.accumulated, subject, saved_qwen2, 2, strategy="zero2", options=UNCLIPPED)[0]
        # Zeros of the same size: weights that have not moved.
        still = {name: bytes(len(data)) for name, data in whole.items()}
        evidence = {"moved_by": greatest_difference(whole, still), "off_by": greatest_difference(parts, whole)}
        assert evidence["moved_by"] > SIGNIFICANT
        return Finding(Verdict.OK if evidence["off_by"] <= WEIGHT_TOLERANCE else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="zero2")


@pytest.mark.known_issue("ppo-adapter-reference")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1"])
def test_reference_of_an_adapter(
    strategy: str, subject: str, judge: Judge, launch_once: Callable[..., list[Any]], saved_mistral: TinyModel
) -> None:
    """PPO's reference is its policy without the adapter.

    Right is: the numbers of each step are those of a training whose reference is a copy of the policy, made before it
    got its adapter; and the adapter that is saved is bitwise the one that was trained.
    """

    def trainings(of: str, references: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        first: dict[str, Any] = launch_once(adapter_trainings, of, saved_mistral, references, strategy=strategy)[0]
        return first

    def measure() -> Finding:
        require_ppo()
        if not stack.satisfied({"trl": ">=0.13"}, stack.installed()):
            raise Absent("PPO takes adapters from trl 0.13.0 on")
        run = trainings(subject, REFERENCES if subject == "corrected" else (OFF,))[OFF]
        expected = trainings("corrected", REFERENCES)[COPY]
        assert len(expected["log"]) == ppo.STEPS, expected
        kl = [[entry["objective/kl"] for entry in training["log"]] for training in (run, expected)]
        assert max(map(abs, kl[1])) > 10 * TOLERANCE, f"the policy is far from its reference: {kl}"
        difference = greatest_difference_of_logs(run["log"], expected["log"])
        evidence = {
            "max_difference_to_copy": difference,
            "kl": kl[0],
            "kl_to_copy": kl[1],
            **{key: run[key] for key in ("trained", "saved", "equal")},
        }
        right = difference <= TOLERANCE and 0 < run["trained"] == run["saved"] == run["equal"]
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=strategy)


@pytest.mark.known_issue("ppo-strategy-memory")
@pytest.mark.every_pair
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_memory(
    strategy: str, subject: str, judge: Judge, launcher: Launcher, launches: LaunchCache, deep_qwen2: TinyModel
) -> None:
    """What a rank of PPO holds of its accelerator's memory, against what was promised.

    Right is: between updates, while it generates, in the reference model's forward pass, while it scores, in the
    training of policy and value model and at the peak of an update, a rank holds no more copies of the models than its
    strategy and its arguments promise: of policy and value model as GRPO of its policy, of reference and reward model,
    which are as large together, as GRPO of its reference model. For the promises and their sources see
    :mod:`suites.sharding.memory`.
    """

    def measure() -> Finding:
        require_ppo(strategy)
        if launcher.device == "cuda":
            raise Untestable("on a GPU, what cuBLAS allocates for itself counts as well, and is as large as this model")
        result = launches(
            ppo_memory.train,
            subject,
            deep_qwen2,
            strategy=strategy,
            options=STRATEGIES[strategy],
            **({"world_size": 1} if strategy == "single" else {}),
            # A broken trainer fails before it has wrapped anything.
            sharded=False,
        )
        return judge_memory(strategy, result.values, "scoring")

    judge(measure, subject=subject, strategy=strategy)
