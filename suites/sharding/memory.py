"""How much memory a strategy allows a rank, in copies of the model, and what was measured above it.

Runs in the test process. What a strategy promises is written where it is defined:

- DDP keeps all of everything on every rank, and buckets of the size of the gradients
  (``gradient_as_bucket_view`` of PyTorch's ``DistributedDataParallel``).
- ZeRO-2 shards gradients and optimizer, ZeRO-3 parameters too. ``estimate_zero2_model_states_mem_needs``, in
  ``deepspeed.runtime.zero.stage_1_and_2``, counts what belongs to that: of each parameter two gradients, one as the
  backward pass left it and one for the optimizer, a master copy, and the states of Adam. One bucket of
  ``reduce_bucket_size`` elements is for communication. Under ZeRO-3 ``stage3_max_live_parameters`` and
  ``stage3_prefetch_bucket_size`` bound what is gathered at once.
- FSDP shards parameters, gradients and optimizer, and gathers one unit while the next one is on its way
  (``limit_all_gathers`` of ``FullyShardedDataParallel``; "implicit prefetching" of ``fully_shard``).
- AdamW with ``foreach`` needs "sizeof(params)" more while it steps (``torch.optim.AdamW``).
- GRPO under ZeRO-3 gathers the whole policy to generate where ``ds3_gather_for_generation`` says so, which is TRL's
  default: "disabling this option allows training models that exceed the VRAM capacity of a single GPU".
- A reference model has parameters alone, and TRL prepares it as the policy is prepared: sharded under ZeRO-3 and FSDP.

PPO trains a policy and a value model of its size, and has a reference and a reward model beside them: a model of PPO's
is the first two together, its reference the other two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.launch import strategy as make_strategy
from pytest_trlcompat.plugin.judging import Absent, Finding

from ..in_rank import memory
from ..launches import distinct
from .trainings import WORLD_SIZE, built_as_asked

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

__all__ = ["NO_GATHER", "STRATEGIES", "allowed", "judge_memory", "train"]

BUCKET = 250_000
"""Elements of a communication bucket of DeepSpeed's, which is some more than a layer of the model has."""
NO_GATHER = "zero3-no_gather"
"""ZeRO-3 with ``ds3_gather_for_generation=False``."""
ASKED = {
    "zero3": "all of the policy is gathered to generate, TRL's default (from 0.15 on ds3_gather_for_generation=True)",
    NO_GATHER: "nothing is gathered to generate beyond what computes: ds3_gather_for_generation=False",
}
"""What a user has asked for, beyond the strategy."""
ELEMENT = 4
"""Bytes, of float32."""
ACTIVATIONS = 0.15
"""Share of the model. 0.09 was seen at most, in a single process, where nothing else comes to what a model holds."""
PADDING = 0.03
"""Share of the model: by which shards of equal length are longer, and what stays of a batch. 0.006 was seen."""
UNITS = 4
"""Two layers of parameters, the one that computes and the next, each with the buffer that it was received in."""
UNITS_OF_GRADIENTS = 2
"""The gradients of a layer, and the buffer from which they are sent."""

_ZERO = {"reduce_bucket_size": BUCKET, "overlap_comm": False}
_ZERO3 = {**_ZERO, "stage3_prefetch_bucket_size": BUCKET, "stage3_max_live_parameters": BUCKET}
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "single": {},
    "ddp": {},
    "zero2": {"zero_optimization": _ZERO},
    "zero3": {"zero_optimization": _ZERO3},
    NO_GATHER: {"zero_optimization": _ZERO3},
    "fsdp1": {},
    "fsdp2": {},
}
"""What is measured, with the options of a launch."""


def train(launches: LaunchCache, model: TinyModel, subject: str, strategy: str) -> Sequence[Mapping[str, Any]]:
    """What :func:`in_rank.memory.train` returned on each rank, trained once for all suites.

    Raises:
        Absent: this release of TRL has no such argument, or this stack no such strategy.
        LaunchError: it failed before there was anything to measure.
    """
    if strategy == NO_GATHER and not stack.satisfied({"trl": ">=0.15"}, stack.installed()):
        raise Absent("GRPOConfig has ds3_gather_for_generation from trl 0.15 on")
    kind = strategy.partition("-")[0]
    result = launches(
        memory.train,
        subject,
        model,
        **({"ds3_gather_for_generation": False} if strategy == NO_GATHER else {}),
        strategy=kind,
        options=STRATEGIES[strategy],
        world_size=1 if kind == "single" else WORLD_SIZE,
        # A broken trainer fails before it has wrapped anything.
        sharded=False,
    )
    if kind != "single":
        failure = next((rank["failure"] for rank in result.values if rank["failure"]), None)
        built_as_asked(kind, result.ranks[0].proof["engines"], failure)
    return result.values


@dataclass(frozen=True)
class _Copies:
    """Copies of the model that a rank holds: so many whole, and its shards of so many."""

    whole: int = 0
    sharded: int = 0

    def share(self, ranks: int) -> float:
        return self.whole + self.sharded / ranks


# Parameters and Adam's two states; what else stays between steps is named.
_BETWEEN_STEPS = {
    "single": _Copies(whole=3),
    "ddp": _Copies(whole=4),  # buckets of the gradients
    "zero2": _Copies(whole=1, sharded=3),  # the master copy
    "zero3": _Copies(sharded=5),  # the master copy, and the buffer in which gradients gather
    "fsdp1": _Copies(sharded=4),  # gradients, which FSDP1 lets go of when the next forward pass begins
    "fsdp2": _Copies(sharded=3),
}
# Gradients, as the backward pass leaves them, as far as they are not there between steps.
_GRADIENTS = {
    "single": _Copies(whole=1),
    "ddp": _Copies(whole=1),
    "zero2": _Copies(sharded=1),
    "zero3": _Copies(),
    "fsdp1": _Copies(sharded=1),  # those of the step before are gone by then
    "fsdp2": _Copies(sharded=1),
}
# Gradients, as far as they are not there between steps, and what AdamW needs to step.
_WITHIN_A_STEP = {
    "single": _Copies(whole=2),
    "ddp": _Copies(whole=2),
    "zero2": _Copies(sharded=3),  # two gradients
    "zero3": _Copies(sharded=2),  # the optimizer's gradients
    "fsdp1": _Copies(sharded=1),
    "fsdp2": _Copies(sharded=2),
}
_WHOLE = ("single", "ddp")


def allowed(strategy: str, unit: float, bucket: float, ranks: int) -> dict[str, float]:
    """The most that each quantity of :func:`judge_memory` may be, as a share of the model's bytes.

    Args:
        strategy: with the variant ``NO_GATHER``.
        unit: share of the model in its largest unit.
        bucket: share of the model that a bucket of DeepSpeed's holds.
    """
    kind = strategy.partition("-")[0]
    sharded = make_strategy(kind).shards_parameters
    parameters = _Copies(sharded=1) if sharded else _Copies(whole=1)
    held = parameters.share(ranks) + PADDING
    gathered = UNITS * unit if sharded else 0.0
    generation = 1.0 if strategy == "zero3" else gathered
    bucket = bucket if kind.startswith("zero") else 0.0
    rest = _BETWEEN_STEPS[kind].share(ranks) + bucket + held
    gradients = _GRADIENTS[kind].share(ranks) + bucket + (0.0 if kind in _WHOLE else UNITS_OF_GRADIENTS * unit)
    return {
        "policy": held,
        "reference": held,
        "rest": rest,
        "generation": generation + ACTIVATIONS,
        "reference_forward": gathered + ACTIVATIONS,
        "scoring": gathered + ACTIVATIONS,
        "training": gradients + gathered + ACTIVATIONS,
        "step": rest + max(_WITHIN_A_STEP[kind].share(ranks), generation) + ACTIVATIONS,
    }


def judge_memory(strategy: str, ranks: Sequence[Mapping[str, Any]], *phases: str) -> Finding:
    """``wasteful`` where a rank holds more than its strategy promises, ``error`` where training fails.

    Args:
        ranks: as of :func:`train`.
        phases: more of them than GRPO has.

    Returns:
        The evidence has ``shares`` of the model's bytes, on the rank that holds the most: ``policy`` and ``reference``,
        the parameters of each; ``rest``, all that is allocated between steps; ``generation``, ``reference_forward``,
        ``training`` (the policy's forward and backward pass) and ``phases``, what each adds to what there was when it
        began; ``step``, the peak of a step. ``allowed``, by the same names; and ``exceeded``, those that are above it.
    """
    failures = distinct(rank["failure"] for rank in ranks)
    if failures:
        return _failed(failures)
    assert all(set(rank["peaks"]) == {*memory.PHASES, *phases} for rank in ranks), ranks
    size = ranks[0]["size"]
    shares = {
        "policy": max(rank["policy"] for rank in ranks) / size,
        "reference": max(rank["reference"] for rank in ranks) / size,
        "rest": max(rank["rest"] for rank in ranks) / size,
        "generation": _extra(ranks, "generation"),
        "reference_forward": _extra(ranks, "reference"),
        **{phase: _extra(ranks, phase) for phase in phases},
        "training": _extra(ranks, "training"),
        "step": max(max(rank["peaks"].values()) for rank in ranks) / size,
    }
    return _finding(strategy, ranks, shares)


def _failed(failures: Sequence[str]) -> Finding:
    others = {"failures_of_other_ranks": failures[1:]} if failures[1:] else {}
    return Finding(Verdict.ERROR, {"failure": failures[0], **others})


def _extra(ranks: Sequence[Mapping[str, Any]], phase: str) -> float:
    return float(max(rank["extra"][phase] / rank["size"] for rank in ranks))


def _finding(strategy: str, ranks: Sequence[Mapping[str, Any]], shares: Mapping[str, float]) -> Finding:
    size, unit = ranks[0]["size"], ranks[0]["unit"]
    limits = allowed(strategy, unit / size, BUCKET * ELEMENT / size, len(ranks))
    exceeded = [name for name, share in shares.items() if share > limits[name]]
    evidence = {
        "shares": {name: round(share, 3) for name, share in shares.items()},
        "allowed": {name: round(limits[name], 3) for name in shares},
        "exceeded": exceeded,
        "model_bytes": size,
        "largest_unit": round(unit / size, 3),
        **({"asked": ASKED[strategy]} if strategy in ASKED else {}),
    }
    return Finding(Verdict.WASTEFUL if exceeded else Verdict.OK, evidence)
