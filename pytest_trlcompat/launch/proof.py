"""Proof, from inside a rank, that the launch is as requested: no silent downgrade.

Accelerate on a plain CPU turns FSDP into DDP, and newer releases turn it into one process. Therefore each rank records
every engine that its function builds (see :mod:`pytest_trlcompat.launch.engines`). The launch fails unless world size,
distributed type, device and sharding are as requested. Engines are judged one by one, since a sharded reference model
proves nothing about the policy. The test process compares the engines of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_trlcompat._due import Account
from pytest_trlcompat.launch.strategy import Strategy
from pytest_trlcompat.strategies import family_of
from pytest_trlcompat.strategies.family import DISTRIBUTED_TYPES

__all__ = ["Expectation", "NotProved", "check", "disagreement", "expectation"]

_DEVICE_TYPES = {"software": "npu", "cuda": "cuda", "cpu": "cpu"}
"""What torch calls the devices of launches."""


class NotProved(RuntimeError):
    """A rank ran under another strategy, world size or device than requested."""


@dataclass(frozen=True)
class Expectation:
    """What every rank of a launch must observe.

    Attributes:
        distributed_type: Accelerate's, of an ``Accelerator``.
        distributed_type_at_first: Accelerate's, as long as there is no ``Accelerator``. Only an ``Accelerator`` sets
            FSDP: with TrainingArguments alone FSDP cannot be distinguished from DDP.
        engine: the kind of engine that the function must build; ``None`` if it need not build one.
        required: what the family of the strategy requires of the engine: the stage of DeepSpeed, the sharding strategy
            of FSDP1.
    """

    strategy: str
    world_size: int
    device_type: str
    distributed_type: str
    distributed_type_at_first: str
    engine: str | None
    parameters_sharded: bool
    required: Mapping[str, Any] = field(default_factory=dict)


def expectation(strategy: Strategy, world_size: int, device: str, sharded: bool) -> Expectation:
    """What :func:`check` requires of every rank.

    Args:
        sharded: require that the function builds an engine of the strategy; ``False`` for functions that build none.
    """
    family = strategy.family
    distributed = family.distributed_type(device)
    return Expectation(
        strategy=strategy.name,
        world_size=world_size,
        device_type=_DEVICE_TYPES[device],
        distributed_type=distributed,
        distributed_type_at_first=distributed if family.has_type_at_first else DISTRIBUTED_TYPES[device],
        engine=family.kind if sharded and family.builds_engine(world_size) else None,
        parameters_sharded=strategy.shards_parameters and world_size > 1,
        required=family.required(strategy.name, strategy.settings, world_size),
    )


def check(expectation: Expectation, seen: Mapping[str, Any], rank: int) -> None:
    """Compare what a rank observed with what was requested.

    Raises:
        NotProved: names every difference.
    """
    differences = [*_process_differences(expectation, seen), *_engine_differences(expectation, seen)]
    if differences:
        raise NotProved(
            f"rank {rank} did not run under strategy {expectation.strategy!r} as requested: " + "; ".join(differences)
        )


def _process_differences(expectation: Expectation, seen: Mapping[str, Any]) -> list[str]:
    differences = []
    if seen.get("world_size", 1) != expectation.world_size:
        differences.append(f"world size {expectation.world_size} was requested, {seen.get('world_size', 1)} was found")
    if expectation.strategy != "single" and not seen.get("initialized", False):
        differences.append("no process group was initialised")
    # Known only if the function used Accelerate.
    for key in ("distributed_type", "distributed_type_at_first", "device_type"):
        if key in seen and seen[key] != getattr(expectation, key):
            what = key.removesuffix("_at_first").replace("_", " ")
            differences.append(f"Accelerate's {what} {getattr(expectation, key)} was requested, {seen[key]} was found")
    return differences


def _engine_differences(expectation: Expectation, seen: Mapping[str, Any]) -> list[str]:
    built, name = seen["built"], expectation.engine
    if name is None:
        return []
    if not any(engine["kind"] == name for engine in built):
        kinds = ", ".join(sorted({engine["kind"] for engine in built})) or "none"
        return [f"no {name} engine was built (built: {kinds}); pass sharded=False if the function needs none"]
    account = Account("engines", _names(built))
    for engine, text in zip(built, account.due, strict=True):
        differences = _differences_of(expectation, engine)
        if differences:
            account.refuse(text, " and ".join(differences))
        else:
            account.meet(text)
    shortfalls = [] if account.is_complete else [account.shortfall()]
    if seen.get("optimized"):
        shortfalls.append(
            f"no engine holds a model that can be trained, and an optimizer has {seen['optimized']} parameters"
        )
    return shortfalls


def _names(built: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(built) == 1:
        return [f"the {built[0]['kind']} engine"]
    return [
        f"the {engine['kind']} engine of {_role(engine)} (engine {number} of {len(built)})"
        for number, engine in enumerate(built, 1)
    ]


def _role(engine: Mapping[str, Any]) -> str:
    """What an engine holds, as far as the engine itself tells."""
    if engine["trainable"]:
        return f"the trainable {engine['model']}"
    kind = "reward" if engine["model"].endswith("ForSequenceClassification") else "reference"
    return f"the {kind} model {engine['model']}"


def _differences_of(expectation: Expectation, engine: Mapping[str, Any]) -> list[str]:
    """How one engine differs from what was requested, as it follows the engine's name."""
    if engine["kind"] != expectation.engine:
        return [f"is there, and {expectation.engine} was requested"]
    if engine["total"] == 0:
        return ["holds no parameters"]
    differences = []
    if engine.get("device_type", expectation.device_type) != expectation.device_type:
        differences.append(f"is on {engine['device_type']}, not on {expectation.device_type}")
    differences += family_of(expectation.strategy).differences(expectation.required, engine)
    if expectation.parameters_sharded and engine["local"] >= engine["total"]:
        count = f"{engine['local']} of {engine['total']}"
        differences.append(f"differs: parameters are not sharded: {count} elements are on this rank")
    return differences


def disagreement(proofs: Mapping[int, Mapping[str, Any]]) -> tuple[int, str] | None:
    """The first rank whose engines are not those of the first rank, and in what; ``None`` if there is no such rank.

    Args:
        proofs: what ranks observed, by rank.
    """
    (first, reference), *others = sorted(proofs.items())
    for rank, proof in others:
        ours, theirs = _identities(reference), _identities(proof)
        if ours != theirs:
            what = f"rank {first} built {_listed(ours)}; rank {rank} built {_listed(theirs)}"
            return (rank if len(theirs) <= len(ours) else first), f"ranks built different engines: {what}"
    return None


def _identities(proof: Mapping[str, Any]) -> list[str]:
    """Each engine by what must be the same on all ranks; how many elements lie on a rank need not be."""
    return [
        f"{engine['kind']} of {_role(engine)} with {engine['total']} elements"
        + (f" at stage {engine['zero_stage']}" if "zero_stage" in engine else "")
        for engine in proof["built"]
    ]


def _listed(engines: Sequence[str]) -> str:
    return ", ".join(engines) or "none"
