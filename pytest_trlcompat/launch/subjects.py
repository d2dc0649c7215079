"""Has each collective of a rank say what it is of: which parameters an engine gathers, or whose gradients it reduces.

Ranks that gather different parameters of equal size exchange them without an error, and train on the wrong ones. This
happens under ZeRO-3 if each rank chooses experts for itself. Operation, shape and dtype are the same on both ranks;
only the engine knows what differs. The software accelerator compares that over ranks before each collective, and names
both sides.

The engines' functions are wrapped in ranks on the software accelerator alone, and only those that this release has;
what they do stays as it is. Imports nothing of the stack: it looks at what is imported.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["Subjects", "listed"]


class Subjects:
    """What collectives are of, by the names of the engines' own parameters.

    Args:
        tell: sets what the collectives of the calling thread are of, and returns what it was.
    """

    def __init__(self, tell: Callable[[str], str]) -> None:
        self._tell = tell
        self._names: dict[int, str] = {}
        self._lists: dict[tuple[int, ...], str] = {}
        self._engines = itertools.count()
        # The names that FSDP1 keeps are those below the unit, which are the same in each layer: hence the number.
        self._unit_numbers = itertools.count()
        # Weak keys, so that the units of a model that is gone do not stay alive.
        self._units: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    @classmethod
    def of_this_process(cls) -> Subjects | None:
        """``None`` where no software accelerator compares collectives."""
        module = sys.modules.get("torch_npu")
        if module is None or not getattr(module, "IS_SOFTWARE_ACCELERATOR", False):
            return None
        return cls(module._C.set_subject)

    def install(self) -> None:
        """Wrap the functions of DeepSpeed, FSDP1 and FSDP2 that begin collectives, in this process only."""
        if (engine := _class("deepspeed.runtime.engine", "DeepSpeedEngine")) is not None:
            self._after(engine, "__init__", self._name_parameters)
        if (init := _class("deepspeed.runtime.zero.partition_parameters", "Init")) is not None:
            self._wrap(init, "_all_gather", lambda _, params, *args, **kwargs: self._gathering(params))
            self._after(init, "_convert_to_deepspeed_param", self._watch_coalesced)
        if (stage3 := _class("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")) is not None:
            # The bucket's parameters are the first argument in releases that have more.
            for name in ("__avg_scatter_grads", "__avg_scatter_contiguous_grads"):
                self._wrap(stage3, f"_{stage3.__name__}{name}", self._reducing_stage3)
        if (stage2 := _class("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")) is not None:
            self._wrap(stage2, "reduce_ipg_grads", lambda optimizer, *args, **kwargs: _reducing_stage2(optimizer))
        if (group := _class("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup")) is not None:
            self._wrap(group, "unshard", lambda group, *args, **kwargs: f"the parameters of {self._group(group)}")
            self._wrap(group, "post_backward", lambda group, *args, **kwargs: f"the gradients of {self._group(group)}")
        if (handle := _class("torch.distributed.fsdp._flat_param", "FlatParamHandle")) is not None:
            self._after(handle, "__init__", self._number_unit)
            self._wrap(handle, "_all_gather_flat_param", lambda unit, *_: f"the parameters of {self._unit(unit)}")
        if (runtime := sys.modules.get("torch.distributed.fsdp._runtime_utils")) is not None:
            for name in ("_reduce_grad", "_reduce_grad_no_shard"):
                self._wrap(runtime, name, lambda _, handle, *args, **kwargs: f"the gradients of {self._unit(handle)}")

    def _wrap(self, owner: Any, name: str, describe: Callable[..., str]) -> None:
        """Make ``owner.name`` say, while it runs, what its collectives are of; do nothing if there is no such name."""
        function = getattr(owner, name, None)
        if function is None:
            return
        setattr(owner, name, self._telling(function, describe))

    def _telling(self, function: Callable[..., Any], describe: Callable[..., str]) -> Callable[..., Any]:
        tell = self._tell

        @functools.wraps(function)
        def telling(*args: Any, **kwargs: Any) -> Any:
            before = tell(_described(describe, args, kwargs))
            try:
                return function(*args, **kwargs)
            finally:
                tell(before)

        return telling

    @staticmethod
    def _after(owner: type, name: str, look: Callable[..., None]) -> None:
        function = getattr(owner, name, None)
        if function is None:
            return

        @functools.wraps(function)
        def looking(*args: Any, **kwargs: Any) -> Any:
            returned = function(*args, **kwargs)
            look(*args, **kwargs)
            return returned

        setattr(owner, name, looking)

    def _name_parameters(self, engine: Any, *args: Any, **kwargs: Any) -> None:
        """Learn the names of an engine's parameters; those of a further model say which engine's they are."""
        number = next(self._engines)
        model = f" (engine {number})" if number else ""
        for name, parameter in engine.module.named_parameters():
            if hasattr(parameter, "ds_id"):
                # A parameter that several engines share keeps the name by the first.
                self._names.setdefault(parameter.ds_id, f"{name}{model}")
        # Texts that were made before these names were known.
        self._lists.clear()

    def _watch_coalesced(self, init: Any, parameter: Any, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed gives each parameter a function of its own, which gathers several in the order of their ids."""
        gather = getattr(parameter, "all_gather_coalesced", None)
        if gather is None:
            return

        @functools.wraps(gather)
        def telling(params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            listed_params = list(params)  # which may be an iterator, to be read once
            before = self._tell(_described(lambda: self._gathering(sorted(listed_params, key=_id_of)), (), {}))
            try:
                return gather(listed_params, *args, **kwargs)
            finally:
                self._tell(before)

        parameter.all_gather_coalesced = telling

    def _gathering(self, parameters: Iterable[Any]) -> str:
        return f"the parameters {self._listed(parameters)}"

    def _listed(self, parameters: Iterable[Any]) -> str:
        """The same text for the same parameters."""
        parameters = tuple(parameters)
        ids = tuple(parameter.ds_id for parameter in parameters)
        # Made once, since a training gathers the same parameters at each step.
        if ids not in self._lists:
            self._lists[ids] = listed(map(self._name, parameters))
        return self._lists[ids]

    def _reducing_stage3(self, optimizer: Any, parameters: Any, *args: Any, **kwargs: Any) -> str:
        # The contiguous form gets a buffer, and finds the parameters in the bucket.
        in_bucket = parameters if isinstance(parameters, (list, tuple)) else _bucket_of(optimizer)
        return f"the gradients of {self._listed(in_bucket)}"

    def _name(self, parameter: Any) -> str:
        return self._names.get(parameter.ds_id) or f"parameter {parameter.ds_id} of shape {tuple(parameter.ds_shape)}"

    def _group(self, group: Any) -> str:
        return f"FSDP2's group {group._module_fqn or '(root)'}"

    def _number_unit(self, handle: Any, *args: Any, **kwargs: Any) -> None:
        """All ranks build the same units in the same order; which they use first may differ."""
        self._units[handle] = f"FSDP1's unit {next(self._unit_numbers)}, {listed(handle.flat_param._fqns)}"

    def _unit(self, handle: Any) -> str:
        return self._units[handle]


def _class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _described(describe: Callable[..., str], args: Any, kwargs: Any) -> str:
    """Empty where an engine keeps its parameters elsewhere than this knows: then shapes alone are compared."""
    try:
        return describe(*args, **kwargs)
    except (AttributeError, TypeError, IndexError, KeyError, ValueError):
        return ""


def _id_of(parameter: Any) -> int:
    return int(parameter.ds_id)


def _bucket_of(optimizer: Any) -> list[Any]:
    buckets = getattr(optimizer, "ipg_buckets", None)
    if buckets is None:
        return list(optimizer.params_in_ipg_bucket)
    return [parameter for bucket in buckets.values() for parameter in bucket.params]


def _reducing_stage2(optimizer: Any) -> str:
    """The bucket holds a parameter, or its place in its group, between the number of the group and an id of its own."""
    names = []
    for group, parameter, _ in _bucket_of(optimizer):
        tensor = optimizer.bit16_groups[group][parameter] if isinstance(parameter, int) else parameter
        names.append(optimizer.param_names[tensor])
    return f"the gradients of {listed(names)}" if names else ""


def listed(names: Iterable[str]) -> str:
    """Names of parameters, several of one module together: ``norm.weight; experts.3: up.weight, down.weight``."""
    return "; ".join(_of_module(module, [leaf for _, leaf in parts]) for module, parts in _by_module(names))


def _of_module(module: str, leaves: list[str]) -> str:
    if not module or len(leaves) == 1:
        return ", ".join(f"{module}.{leaf}".lstrip(".") for leaf in leaves)
    return f"{module}: {', '.join(leaves)}"


def _by_module(names: Iterable[str]) -> Iterator[tuple[str, Iterator[tuple[str, str]]]]:
    parts = (name.split(".") for name in names)
    split = ((".".join(part[:-2]), ".".join(part[-2:])) for part in parts)
    return itertools.groupby(split, key=lambda module_and_leaf: module_and_leaf[0])
