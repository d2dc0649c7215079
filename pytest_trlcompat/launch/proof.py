"""Proof, from inside a rank, that the launch is as requested: no silent downgrade.

Accelerate on plain CPU turns FSDP into DDP, and newer releases into one process. So each rank records every engine
that its function builds (DDP, FSDP1, FSDP2, DeepSpeed), and the launch fails unless world size, distributed type,
device and sharding are as requested. Engines are judged one by one, since a reference model that is sharded says
nothing of the policy, and the test process compares the ranks' engines. They are read while the process group exists:
many functions end by destroying it.
Imports torch only inside functions.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_trlcompat._due import Account
from pytest_trlcompat.launch.strategy import Strategy

__all__ = ["Expectation", "NotProved", "Observer", "check", "disagreement", "expectation", "load_engines"]

_DEVICE_TYPES = {"software": "npu", "cuda": "cuda", "cpu": "cpu"}
_ENGINES = {
    "ddp": ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    "fsdp1": ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    "fsdp2": ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup"),
    "deepspeed": ("deepspeed.runtime.engine", "DeepSpeedEngine"),
}
"""Module and class of each kind of engine; for FSDP2, which has no wrapper, the group of parameters."""
_FSDP2_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Of FSDP1, in the order of their numbers."""
_DDP_TYPES = {"software": "MULTI_NPU", "cuda": "MULTI_GPU", "cpu": "MULTI_CPU"}


class NotProved(RuntimeError):
    """A rank ran under another strategy, world size or device than requested."""


@dataclass(frozen=True)
class Expectation:
    """What every rank of a launch must observe.

    Attributes:
        distributed_type: Accelerate's, of an ``Accelerator``.
        distributed_type_at_first: the same while there is none. Only the Accelerator sets FSDP; with TrainingArguments
            alone it cannot be distinguished from DDP.
        engine: the kind that the function must build; ``None`` for none.
        zero_stage: that of DeepSpeed, if it is used.
        sharding_strategy: that of FSDP1, as PyTorch names it, if it is used by several ranks.
    """

    strategy: str
    world_size: int
    device_type: str
    distributed_type: str
    distributed_type_at_first: str
    engine: str | None
    zero_stage: int | None
    parameters_sharded: bool
    sharding_strategy: str | None = None


def expectation(strategy: Strategy, world_size: int, device: str, sharded: bool) -> Expectation:
    """What :func:`check` requires of every rank.

    Args:
        sharded: require that the function builds an engine of the strategy; ``False`` for functions that build none.
    """
    # Accelerate wraps a model in DDP only if there are several processes.
    unwrapped = strategy.name == "single" or (strategy.name == "ddp" and world_size == 1)
    distributed = "NO"
    if strategy.config is not None:
        distributed = "DEEPSPEED"
    elif strategy.fsdp is not None:
        distributed = "FSDP"
    elif strategy.name == "ddp":
        distributed = _DDP_TYPES[device]
    return Expectation(
        strategy=strategy.name,
        world_size=world_size,
        device_type=_DEVICE_TYPES[device],
        distributed_type=distributed,
        distributed_type_at_first=_DDP_TYPES[device] if strategy.fsdp is not None else distributed,
        engine=_engine_name(strategy) if sharded and not unwrapped else None,
        zero_stage=strategy.zero_stage,
        parameters_sharded=strategy.shards_parameters and world_size > 1,
        sharding_strategy=_sharding_strategy(strategy) if world_size > 1 else None,
    )


def _sharding_strategy(strategy: Strategy) -> str | None:
    """Of FSDP1, whose settings have it by name or by number."""
    if strategy.name != "fsdp1" or strategy.fsdp is None:
        return None
    text = str(strategy.fsdp["sharding_strategy"]).upper().removeprefix("_")
    return _SHARDING_STRATEGIES[int(text) - 1] if text in ("1", "2", "3", "4", "5") else text


def _engine_name(strategy: Strategy) -> str:
    if strategy.config is not None:
        return "deepspeed"
    return strategy.name


def load_engines(strategy: str) -> None:
    """Import the modules that define engines, so that an :class:`Observer` can wrap them.

    Those of PyTorch under every strategy, since an engine of another kind than requested is to be seen; DeepSpeed's,
    which takes seconds, only where it was requested. If one cannot be imported, the function gets the same error later.
    """
    names = ("ddp", "fsdp1", "fsdp2", *(["deepspeed"] if strategy.startswith("zero") else []))
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(_ENGINES[name][0])


class Observer:
    """Records the engines that are built in this process after :meth:`install`, and keeps them alive."""

    def __init__(self) -> None:
        self._engines: list[tuple[str, Any]] = []
        self._while_live: dict[str, Any] = {}
        self._observed: set[str] = set()
        self._sharded: list[Any] = []

    def install(self) -> None:
        """Wrap the constructors of the engines, and the end of the process group, in this process only."""
        for name, (module, path) in _ENGINES.items():
            # Engines of a module that the function imports later are looked for among the live objects.
            if module in sys.modules:
                self._observe(name, getattr(sys.modules[module], path))
                self._observed.add(name)
        if _FSDP2_STATE in sys.modules:
            self._observe_sharded(sys.modules[_FSDP2_STATE].FSDPState)
        if "torch.distributed" in sys.modules:
            self._observe_end(sys.modules["torch.distributed"])

    def _observe_end(self, distributed: Any) -> None:
        if not distributed.is_available():
            return
        destroy: Callable[..., None] = distributed.destroy_process_group

        @functools.wraps(destroy)
        def observed(group: Any = None) -> None:
            if distributed.is_initialized() and group in (None, distributed.GroupMember.WORLD):
                with contextlib.suppress(Exception):  # the function must not fail because of us
                    self._while_live = self._look()
            destroy(group)

        for module in (distributed, distributed.distributed_c10d):
            module.destroy_process_group = observed

    def _observe_sharded(self, state: Any) -> None:
        """Record the modules that FSDP2 is applied to, whether or not they have parameters of their own."""
        start: Callable[..., None] = state.init

        @functools.wraps(start)
        def observed(instance: Any, modules: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            start(instance, modules, *args, **kwargs)
            self._sharded.append(modules[0])

        state.init = observed

    def _observe(self, name: str, engine: type) -> None:
        build: Callable[..., None] = engine.__init__  # type: ignore[misc]

        @functools.wraps(build)
        def observed(instance: Any, *args: Any, **kwargs: Any) -> None:
            build(instance, *args, **kwargs)
            self._engines.append((name, instance))
            # In case the group is destroyed by a name that somebody has imported before it was wrapped.
            self._while_live |= _process_state()

        engine.__init__ = observed  # type: ignore[misc]

    def seen(self) -> dict[str, Any]:
        """World size, device, distributed type, and for each kind of engine the number built and their sizes.

        ``local`` and ``total`` count parameter elements: on this rank, and of the whole model. Where the process group
        has been destroyed, it is what was found before.
        """
        seen = self._look()
        return seen if seen.get("initialized") else {**seen, **self._while_live}

    def _look(self) -> dict[str, Any]:
        instances = [*self._engines, *self._built_unobserved()]
        seen: dict[str, Any] = {"engines": {}, "built": [], **_process_state()}
        for name, instance in instances:
            entry = seen["engines"].setdefault(name, {"count": 0, "local": 0, "total": 0})
            entry["count"] += 1
            _MEASURES[name](instance, entry)
        for name, model, parts in _models(instances, self._sharded):
            entry = {"kind": name, "model": _class_name(model), "local": 0, "total": 0}
            for part in parts:
                _MEASURES[name](part, entry)
            seen["built"].append({**entry, "trainable": _is_trainable(name, model)})
        if seen["built"] and not any(engine["trainable"] for engine in seen["built"]):
            seen["optimized"] = _optimized()
        return seen

    def _built_unobserved(self) -> list[tuple[str, Any]]:
        found = []
        for name, (module, path) in _ENGINES.items():
            if name not in self._observed and module in sys.modules:
                engine = getattr(sys.modules[module], path)
                found += [(name, entity) for entity in gc.get_objects() if issubclass(type(entity), engine)]
        return found


def _optimized() -> int:
    """The number of parameters that live optimizers of PyTorch can change."""
    optimizer = sys.modules["torch"].optim.Optimizer
    return sum(
        parameter.requires_grad
        for entity in gc.get_objects()
        if issubclass(type(entity), optimizer)
        for group in getattr(entity, "param_groups", ())
        for parameter in group["params"]
    )


def _models(instances: Sequence[tuple[str, Any]], sharded: Sequence[Any]) -> list[tuple[str, Any, list[Any]]]:
    """The engines in the order in which they were built: kind, the wrapped model, and what it is made of.

    FSDP wraps parts of a model, which count as one engine with the outermost of them.

    Args:
        sharded: the modules that FSDP2 was applied to. One whose parameters all belong to others has no group.
    """
    models: list[tuple[str, Any, list[Any]]] = []
    for name, more in (("fsdp1", ()), ("fsdp2", sharded)):
        models += [(name, *model) for model in _outermost([part for kind, part in instances if kind == name], more)]
    models += [(name, part, [part]) for name, part in instances if name not in ("fsdp1", "fsdp2")]
    order = {id(part): number for number, (_, part) in enumerate(instances)}
    return sorted(models, key=lambda model: min(order[id(part)] for part in model[2]))


def _outermost(parts: Sequence[Any], more: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    """Parts of models by the outermost module that has them: an FSDP1 unit, or a module that FSDP2 was applied to."""
    modules = {id(part): _module(part) for part in parts}
    tops = {id(top): top for top in (*modules.values(), *more)}
    held = {number: [id(module) for module in top.modules()] for number, top in tops.items()}
    owners: dict[int, Any] = {}
    for top in sorted(tops.values(), key=lambda top: len(held[id(top)]), reverse=True):
        for module in held[id(top)]:
            owners.setdefault(module, top)
    groups: dict[int, tuple[Any, list[Any]]] = {}
    for part in parts:
        top = owners[id(modules[id(part)])]
        groups.setdefault(id(top), (top, []))[1].append(part)
    return list(groups.values())


def _module(part: Any) -> Any:
    return part.modules[0] if hasattr(part, "fsdp_params") else part


def _class_name(engine: Any) -> str:
    """That of the model itself, which FSDP2 has renamed."""
    model = engine.module if hasattr(engine, "module") and not hasattr(engine, "_get_fsdp_state") else engine
    return type(model).__name__.removeprefix("FSDP")


def _is_trainable(name: str, model: Any) -> bool:
    """Whether an engine can train what it holds; a DeepSpeed engine without an optimizer cannot."""
    if name == "deepspeed" and type(getattr(model, "optimizer", None)).__name__ in (
        "NoneType",
        "DummyOptim",
        "DeepSpeedZeRoOffload",
    ):
        return False
    return any(parameter.requires_grad for parameter in model.parameters())


def _process_state() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    if "torch" in sys.modules:
        distributed = sys.modules["torch"].distributed
        ready = distributed.is_available() and distributed.is_initialized()
        seen["initialized"] = ready
        seen["world_size"] = distributed.get_world_size() if ready else 1
        if ready:
            seen["backend"] = distributed.get_backend()
    return seen | _accelerate_state()


def _accelerate_state() -> dict[str, Any]:
    if "accelerate.state" not in sys.modules:
        return {}
    state = sys.modules["accelerate.state"]
    partial, full = state.PartialState._shared_state, state.AcceleratorState._shared_state
    shared = {**partial, **full}
    if "distributed_type" not in shared:
        return {}
    kind, device = shared["distributed_type"], shared.get("device")
    key = "distributed_type" if "distributed_type" in full else "distributed_type_at_first"
    seen = {key: getattr(kind, "value", str(kind))}
    # None as long as only the state of Accelerate 1.10 was used.
    return seen if device is None else {**seen, "device_type": device.type}


def _measure_ddp(engine: Any, entry: dict[str, Any]) -> None:
    count = sum(parameter.numel() for parameter in engine.module.parameters())
    entry["local"] += count
    entry["total"] += count
    entry["device_type"] = engine.device.type if engine.device is not None else None


def _measure_fsdp1(engine: Any, entry: dict[str, Any]) -> None:
    handle = getattr(engine, "_handle", None)
    if handle is None:  # a root whose parameters all belong to nested units
        return
    flat = handle.flat_param
    sharded = getattr(flat, "_local_shard", flat)
    entry["local"] += sharded.numel()
    entry["total"] += int(flat._unpadded_unsharded_size.numel())
    entry["device_type"] = handle.device.type
    entry["sharding_strategy"] = handle._sharding_strategy.name
    entry["sharding_strategies"] = sorted({*entry.get("sharding_strategies", ()), handle._sharding_strategy.name})


def _measure_fsdp2(engine: Any, entry: dict[str, Any]) -> None:
    for parameter in engine.fsdp_params:
        entry["local"] += parameter.sharded_size.numel()
        entry["total"] += parameter._orig_size.numel()
    entry["device_type"] = engine.device.type


def _measure_deepspeed(engine: Any, entry: dict[str, Any]) -> None:
    entry["zero_stage"] = max(entry.get("zero_stage", 0), engine.zero_optimization_stage())
    for parameter in engine.module.parameters():
        whole = getattr(parameter, "ds_numel", None)
        entry["local"] += parameter.numel() if whole is None else parameter.ds_tensor.numel()
        entry["total"] += parameter.numel() if whole is None else whole
    entry["device_type"] = engine.device.type


_MEASURES: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "ddp": _measure_ddp,
    "fsdp1": _measure_fsdp1,
    "fsdp2": _measure_fsdp2,
    "deepspeed": _measure_deepspeed,
}


def check(wanted: Expectation, seen: Mapping[str, Any], rank: int) -> None:
    """Compare what a rank observed with what was requested.

    Raises:
        NotProved: names every difference.
    """
    differences = [*_process_differences(wanted, seen), *_engine_differences(wanted, seen)]
    if differences:
        raise NotProved(
            f"rank {rank} did not run under strategy {wanted.strategy!r} as requested: " + "; ".join(differences)
        )


def _process_differences(wanted: Expectation, seen: Mapping[str, Any]) -> list[str]:
    found = []
    if seen.get("world_size", 1) != wanted.world_size:
        found.append(f"world size {wanted.world_size} was requested, {seen.get('world_size', 1)} was found")
    if wanted.strategy != "single" and not seen.get("initialized", False):
        found.append("no process group was initialised")
    # Known only if the function used Accelerate.
    for key in ("distributed_type", "distributed_type_at_first", "device_type"):
        if key in seen and seen[key] != getattr(wanted, key):
            what = key.removesuffix("_at_first").replace("_", " ")
            found.append(f"Accelerate's {what} {getattr(wanted, key)} was requested, {seen[key]} was found")
    return found


def _engine_differences(wanted: Expectation, seen: Mapping[str, Any]) -> list[str]:
    built, name = seen["built"], wanted.engine
    if name is None:
        return []
    if not any(engine["kind"] == name for engine in built):
        kinds = ", ".join(sorted({engine["kind"] for engine in built})) or "none"
        return [f"no {name} engine was built (built: {kinds}); pass sharded=False if the function needs none"]
    account = Account("engines", _names(built))
    for engine, text in zip(built, account.due, strict=True):
        differences = _differences_of(wanted, engine)
        if differences:
            account.refuse(text, " and ".join(differences))
        else:
            account.meet(text)
    found = [] if account.is_complete else [account.shortfall()]
    if seen.get("optimized"):
        found.append(
            f"no engine holds a model that can be trained, and an optimizer has {seen['optimized']} parameters"
        )
    return found


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


def _differences_of(wanted: Expectation, engine: Mapping[str, Any]) -> list[str]:
    """How one engine differs from what was requested, as it follows the engine's name."""
    if engine["kind"] != wanted.engine:
        return [f"is there, and {wanted.engine} was requested"]
    if engine["total"] == 0:
        return ["holds no parameters"]
    found = []
    if engine.get("device_type", wanted.device_type) != wanted.device_type:
        found.append(f"is on {engine['device_type']}, not on {wanted.device_type}")
    if wanted.zero_stage is not None and engine["zero_stage"] != _stage_due(wanted.zero_stage, engine):
        found.append(f"differs: ZeRO stage {wanted.zero_stage} was requested, {engine['zero_stage']} was found")
    strategies = {name.removeprefix("_") for name in engine.get("sharding_strategies", ())}
    if wanted.sharding_strategy is not None and strategies != {wanted.sharding_strategy}:
        names = ", ".join(sorted(strategies))
        found.append(f"differs: the sharding strategy {wanted.sharding_strategy} was requested, {names} was found")
    if wanted.parameters_sharded and engine["local"] >= engine["total"]:
        count = f"{engine['local']} of {engine['total']}"
        found.append(f"differs: parameters are not sharded: {count} elements are on this rank")
    return found


def _stage_due(requested: int, engine: Mapping[str, Any]) -> int:
    """ZeRO 1 and 2 shard what belongs to an optimizer: a model without one has nothing, and TRL gives it stage 0."""
    no_optimizer = not engine["trainable"] and requested < 3
    return 0 if no_optimizer and engine["zero_stage"] == 0 else requested


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
