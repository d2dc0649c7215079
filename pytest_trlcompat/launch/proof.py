"""Proof, from inside a rank, that the launch is as requested: no silent downgrade.

Accelerate on plain CPU turns FSDP into DDP, and newer releases into one process. So each rank records every engine
that its function builds (DDP, FSDP1, FSDP2, DeepSpeed), and the launch fails unless world size, distributed type,
device and sharding are as requested. They are read while the process group exists: many functions end by destroying it.
Imports torch only inside functions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_trlcompat.launch.strategy import Strategy

__all__ = ["Expectation", "NotProved", "Observer", "check", "expectation", "load_engines"]

_DEVICE_TYPES = {"software": "npu", "cuda": "cuda", "cpu": "cpu"}
_ENGINES = {
    "ddp": ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    "fsdp1": ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    "fsdp2": ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup"),
    "deepspeed": ("deepspeed.runtime.engine", "DeepSpeedEngine"),
}
"""Module and class of each kind of engine; for FSDP2, which has no wrapper, the group of parameters."""
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
    """

    strategy: str
    world_size: int
    device_type: str
    distributed_type: str
    distributed_type_at_first: str
    engine: str | None
    zero_stage: int | None
    parameters_sharded: bool


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
    )


def _engine_name(strategy: Strategy) -> str:
    if strategy.config is not None:
        return "deepspeed"
    return strategy.name


def load_engines(strategy: str) -> None:
    """Import the modules that define the engines of a strategy, so that an :class:`Observer` can wrap them.

    If one cannot be imported, the function gets the same error later.
    """
    wanted = ("deepspeed",) if strategy.startswith("zero") else ("ddp", "fsdp1", "fsdp2")
    for name in wanted:
        with contextlib.suppress(Exception):
            importlib.import_module(_ENGINES[name][0])


class Observer:
    """Records the engines that are built in this process after :meth:`install`, and keeps them alive."""

    def __init__(self) -> None:
        self._engines: list[tuple[str, Any]] = []
        self._while_live: dict[str, Any] = {}

    def install(self) -> None:
        """Wrap the constructors of the engines, and the end of the process group, in this process only."""
        for name, (module, path) in _ENGINES.items():
            # An engine that the server could not import cannot be built by the function either; if it is, the check
            # fails, since it was not observed.
            if module in sys.modules:
                self._observe(name, getattr(sys.modules[module], path))
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
        seen: dict[str, Any] = {"engines": {}, **_process_state()}
        for name, engine in self._engines:
            entry = seen["engines"].setdefault(name, {"count": 0, "local": 0, "total": 0})
            entry["count"] += 1
            _MEASURES[name](engine, entry)
        return seen


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
    engines, name = seen["engines"], wanted.engine
    if name is None:
        return []
    if name not in engines:
        built = ", ".join(sorted(engines)) or "none"
        return [f"no {name} engine was built (built: {built}); pass sharded=False if the function needs none"]
    found, entry = [], engines[name]
    if entry["total"] == 0:
        found.append(f"the {name} engine holds no parameters")
    if entry.get("device_type", wanted.device_type) != wanted.device_type:
        found.append(f"the {name} engine is on {entry['device_type']}, not on {wanted.device_type}")
    if wanted.zero_stage is not None and entry["zero_stage"] != wanted.zero_stage:
        found.append(f"ZeRO stage {wanted.zero_stage} was requested, {entry['zero_stage']} was found")
    if wanted.parameters_sharded and entry["local"] >= entry["total"]:
        found.append(f"parameters are not sharded: {entry['local']} of {entry['total']} elements are on this rank")
    return found
