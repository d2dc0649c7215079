"""Known issue ``grpo-fsdp-ref-model`` (trl 3348): under FSDP the reference model stays whole, and off the accelerator.

Right is: wrapped as the policy is, on the policy's device, only its share of the parameters on each rank, in eval mode;
and training whose losses are those of a single process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.judge import Absent, Finding, Judge
from pytest_trlcompat.verdict import Verdict

from . import grpo, grpo_measures

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel

pytestmark = pytest.mark.known_issue("grpo-fsdp-ref-model")

STRATEGIES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "fsdp1": ("fsdp1", {"sharding_strategy": "FULL_SHARD"}),
    "fsdp1-no_shard": ("fsdp1", {"sharding_strategy": "NO_SHARD"}),
    "fsdp2": ("fsdp2", {}),
}
WRAPPER = {"fsdp1": "FullyShardedDataParallel", "fsdp1-no_shard": "FullyShardedDataParallel", "fsdp2": "FSDPModule"}
CANNOT_PREPARE_FSDP2 = "a model and optimizer must be passed together"
"""Accelerate refuses the policy of a Trainer that prepares its model alone, whatever the reference model is."""
WORLD_SIZE = 2
LOSS_TOLERANCE = 1e-5
GRAD_NORM_TOLERANCE = 1e-4
"""Relative; the norm is a sum over shards in another order."""


@pytest.fixture(scope="module")
def single(launcher: Launcher, saved_qwen2: TinyModel) -> Callable[[str], dict[str, Any]]:
    """The same training in one process, once for each subject."""
    known: dict[str, dict[str, Any]] = {}

    def run(subject: str) -> dict[str, Any]:
        if subject not in known:
            result = launcher(grpo_measures.fsdp_reference, subject, saved_qwen2, strategy="single")
            known[subject] = result.values[0]
        return known[subject]

    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reference_model(
    strategy: str,
    subject: str,
    judge: Judge,
    launcher: Launcher,
    saved_qwen2: TinyModel,
    single: Callable[[str], dict[str, Any]],
) -> None:
    def measure() -> Finding:
        alone = single(subject)
        name, options = STRATEGIES[strategy]
        result = launcher(
            grpo_measures.fsdp_reference,
            subject,
            saved_qwen2,
            strategy=name,
            options=options,
            world_size=WORLD_SIZE,
            sharded=False,  # judged below, since a broken trainer fails before it has wrapped anything
        )
        built = result.ranks[0].proof["engines"]
        if built and name not in built:
            raise Absent(f"{name} was asked for, and this release of Accelerate built {', '.join(built)}")
        failure = result.values[0]["failure"]
        if failure is not None and CANNOT_PREPARE_FSDP2 in failure:
            raise Absent(f"the Trainer of this release of Transformers cannot train under {name}: {failure}")
        evidence = _evidence(strategy, result.values, built, alone)
        if evidence["failure"] is None:
            _assert_policy_is_shared(strategy, built[name])
        return Finding(_verdict(evidence), evidence)

    judge(measure, subject=subject, strategy=strategy)


def _assert_policy_is_shared(strategy: str, engine: dict[str, Any]) -> None:
    """The launcher was not asked to prove it: policy and reference model together, half or all of them on a rank."""
    share = engine["local"] / engine["total"]
    assert share == (1 if strategy == "fsdp1-no_shard" else pytest.approx(1 / WORLD_SIZE, abs=0.01)), engine


def _evidence(
    strategy: str, ranks: list[dict[str, Any]], engines: dict[str, Any], alone: dict[str, Any]
) -> dict[str, Any]:
    total = alone["local"]
    share = total if strategy == "fsdp1-no_shard" else -(-total // WORLD_SIZE)
    first = ranks[0]
    wrapped = all(WRAPPER[strategy] in rank["ref_bases"] for rank in ranks)
    placed = all(rank["ref_devices"] == [rank["device"]] for rank in ranks)
    padding = 64  # shards are padded to equal lengths
    sharded = all(share - padding <= rank["local"] <= share + padding for rank in ranks)
    evidence = {
        "ref_class": first["ref_class"],
        "ref_device": ",".join(first["ref_devices"]),
        "device": first["device"],
        "local_elements": [rank["local"] for rank in ranks],
        "total_elements": total,
        "wrapped_placed_sharded": [wrapped, placed, sharded],
        "eval_mode": not any(rank["training"] for rank in ranks),
        "requires_grad": any(rank["requires_grad"] for rank in ranks),
        "failure": next((rank["failure"] for rank in ranks if rank["failure"]), None),
        "engines": engines,
    }
    if evidence["failure"] is None:
        losses = [sum(step) / len(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
        evidence |= {
            "losses": losses,
            "losses_single": alone["losses"],
            "max_abs_loss_difference": _difference(losses, alone["losses"]),
            "grad_norm": first["grad_norm"],
            "grad_norm_single": alone["grad_norm"],
            "kl": first["kl"],
        }
    return evidence


def _verdict(evidence: dict[str, Any]) -> Verdict:
    if not (all(evidence["wrapped_placed_sharded"]) and evidence["eval_mode"]):
        return Verdict.BROKEN
    if evidence["failure"] is not None:
        return Verdict.ERROR
    assert len(evidence["losses"]) == grpo.STEPS
    right = (
        evidence["max_abs_loss_difference"] <= LOSS_TOLERANCE
        and abs(evidence["kl"][0]) <= LOSS_TOLERANCE
        and evidence["grad_norm"] == pytest.approx(evidence["grad_norm_single"], rel=GRAD_NORM_TOLERANCE)
    )
    return Verdict.OK if right else Verdict.SILENT


def _difference(one: list[float], other: list[float]) -> float:
    return max(abs(left - right) for left, right in zip(one, other, strict=True))
