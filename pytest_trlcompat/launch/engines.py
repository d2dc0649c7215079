"""The engines that a rank's function builds: recorded when they are built, and measured by their families."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pytest_trlcompat.strategies import Family, families

__all__ = ["Observer", "load_engines"]


def _with_engine() -> tuple[Family, ...]:
    """The first family of each engine: several may have the same."""
    # Backwards, so that of several with one engine the first is written last, and stays.
    return tuple({family.engine: family for family in reversed(families()) if family.kind}.values())


def load_engines(strategy: str) -> None:
    """Import the modules that define engines, so that an :class:`Observer` can wrap them."""
    for family in families():
        # PyTorch's under every strategy, so that an engine of another kind than requested is seen; DeepSpeed's, which
        # takes seconds, only if it was requested.
        if family.kind and (not family.is_loaded_on_request or strategy in family.names):
            # The function gets the same error later, if it needs the module.
            with contextlib.suppress(Exception):
                importlib.import_module(family.engine[0])


class Observer:
    """Records the engines that are built in this process after :meth:`install`, and keeps them alive."""

    def __init__(self) -> None:
        self._engines: list[tuple[Family, Any]] = []
        self._while_live: dict[str, Any] = {}
        self._observed: set[Family] = set()
        self._applied_to: list[tuple[Family, Any]] = []

    def install(self) -> None:
        """Wrap the constructors of the engines, and the end of the process group, in this process only."""
        for family in _with_engine():
            # Engines of a module that the function imports later are looked for among the live objects.
            engine = _loaded(family.engine)
            if engine is not None:
                self._observe(family, engine)
                self._observed.add(family)
            applied_by = None if family.applied_by is None else _loaded(family.applied_by)
            if applied_by is not None:
                self._observe_application(family, applied_by)
        if "torch.distributed" in sys.modules:
            self._observe_end(sys.modules["torch.distributed"])

    def _observe_end(self, distributed: Any) -> None:
        if not distributed.is_available():
            return
        destroy: Callable[..., None] = distributed.destroy_process_group

        @functools.wraps(destroy)
        def observed(group: Any = None) -> None:
            # Engines are read while the group exists, and many functions end by destroying it.
            if distributed.is_initialized() and group in (None, distributed.GroupMember.WORLD):
                with contextlib.suppress(Exception):  # the function must not fail because of us
                    self._while_live = self._look()
            destroy(group)

        # Both names, since torch.distributed re-exports it.
        for module in (distributed, distributed.distributed_c10d):
            module.destroy_process_group = observed

    def _observe_application(self, family: Family, state: Any) -> None:
        """Record the modules that an engine is applied to, whether or not they have parameters of their own."""
        start: Callable[..., None] = state.init

        @functools.wraps(start)
        def observed(instance: Any, modules: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            start(instance, modules, *args, **kwargs)
            self._applied_to.append((family, modules[0]))

        state.init = observed

    def _observe(self, family: Family, engine: type) -> None:
        build: Callable[..., None] = engine.__init__  # type: ignore[misc]

        @functools.wraps(build)
        def observed(instance: Any, *args: Any, **kwargs: Any) -> None:
            build(instance, *args, **kwargs)
            self._engines.append((family, instance))
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
        for family, instance in instances:
            entry = seen["engines"].setdefault(family.kind, {"count": 0, "local": 0, "total": 0})
            entry["count"] += 1
            family.measure(instance, entry)
        for family, model, parts in _models(instances, self._applied_to):
            entry = {"kind": family.kind, "model": _class_name(family.model_of(model)), "local": 0, "total": 0}
            for part in parts:
                family.measure(part, entry)
            seen["built"].append({**entry, "trainable": family.is_trainable(model)})
        # Only then, since it looks at every live object.
        if seen["built"] and not any(engine["trainable"] for engine in seen["built"]):
            seen["optimized"] = _optimized()
        return seen

    def _built_unobserved(self) -> list[tuple[Family, Any]]:
        built = []
        for family in _with_engine():
            engine = None if family in self._observed else _loaded(family.engine)
            if engine is not None:
                # By the type, since isinstance falls back on __class__, which lazy objects compute.
                built += [(family, entity) for entity in gc.get_objects() if issubclass(type(entity), engine)]
        return built


def _loaded(path: tuple[str, str]) -> Any:
    """The class by its module and name; ``None`` where the module was not imported."""
    module, name = path
    return getattr(sys.modules[module], name) if module in sys.modules else None


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


def _models(
    instances: Sequence[tuple[Family, Any]], applied_to: Sequence[tuple[Family, Any]]
) -> list[tuple[Family, Any, list[Any]]]:
    """The engines in the order in which they were built: family, the wrapped model, and what it is made of.

    FSDP wraps parts of a model, which count as one engine with the outermost of them.

    Args:
        applied_to: modules that FSDP2 was applied to. One whose parameters all belong to others has no group.
    """
    models: list[tuple[Family, Any, list[Any]]] = []
    for family in _with_engine():
        parts = [part for of, part in instances if of is family]
        if family.is_made_of_parts:
            tops = [module for of, module in applied_to if of is family]
            models += [(family, *model) for model in _outermost(family, parts, tops)]
        else:
            models += [(family, part, [part]) for part in parts]
    order = {id(part): number for number, (_, part) in enumerate(instances)}
    return sorted(models, key=lambda model: min(order[id(part)] for part in model[2]))


def _outermost(family: Family, parts: Sequence[Any], more: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    """Parts of models by the outermost module that has them: an FSDP1 unit, or a module that FSDP2 was applied to."""
    modules = {id(part): family.module_of(part) for part in parts}
    tops = {id(top): top for top in (*modules.values(), *more)}
    below = {number: [id(module) for module in top.modules()] for number, top in tops.items()}
    owners: dict[int, Any] = {}
    # The largest first: it takes all modules below it, and smaller ones what is left.
    for top in sorted(tops.values(), key=lambda top: len(below[id(top)]), reverse=True):
        for module in below[id(top)]:
            owners.setdefault(module, top)
    groups: dict[int, tuple[Any, list[Any]]] = {}
    for part in parts:
        top = owners[id(modules[id(part)])]
        groups.setdefault(id(top), (top, []))[1].append(part)
    return list(groups.values())


def _class_name(model: Any) -> str:
    """That of the model itself, which FSDP2 has renamed."""
    return type(model).__name__.removeprefix("FSDP")


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
    # Read beneath the classes: an instance would initialise a state that the function has not asked for.
    partial, full = state.PartialState._shared_state, state.AcceleratorState._shared_state
    shared = {**partial, **full}
    if "distributed_type" not in shared:
        return {}
    kind, device = shared["distributed_type"], shared.get("device")
    key = "distributed_type" if "distributed_type" in full else "distributed_type_at_first"
    seen = {key: getattr(kind, "value", str(kind))}
    # None as long as only the state of Accelerate 1.10 was used.
    return seen if device is None else {**seen, "device_type": device.type}
