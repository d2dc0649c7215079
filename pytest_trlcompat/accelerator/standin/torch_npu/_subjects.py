"""What collectives are of: engines that gather or reduce parameters say which, for the comparison over ranks.

Ranks that gather different parameters of equal size exchange them, and compute with the wrong ones without a word: two
experts under ZeRO-3, for one. The backend compares what is said here as it compares operation, type and number of
elements. DDP's reducer, which is C++, does not say what is in a bucket.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_npu import _C

__all__ = ["install"]

_ENGINE = "deepspeed.runtime.engine"
_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_STAGE_3 = "deepspeed.runtime.zero.stage3"
_FLAT = "torch.distributed.fsdp._flat_param"
_FSDP1 = "torch.distributed.fsdp._runtime_utils"
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def install() -> None:
    """Have the engines whose modules are imported say what their collectives are of, in this process."""
    for module, name_subjects in (
        (_PARTITION, _of_zero3_gathers),
        (_STAGE_3, _of_zero3_gradients),
        (_FLAT, _of_fsdp1_gathers),
        (_FSDP1, _of_fsdp1_gradients),
        (_FSDP2, _of_fsdp2),
    ):
        if module in sys.modules:
            name_subjects(sys.modules[module])


_said = threading.local()
"""What this thread says at present: autograd has threads of its own, and an engine may gather while it reduces."""


def _say(subject: str) -> None:
    _said.subject = subject
    _C.set_subject(subject)


def _saying_what(method: Callable[..., Any], subject: Callable[..., str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_said, "subject", "")
        _say(subject(*args, **kwargs))
        try:
            return method(*args, **kwargs)
        finally:
            _say(before)

    return call


def _replace(owner: Any, name: str, subject: Callable[..., str]) -> None:
    method = getattr(owner, name, None)
    if method is not None:  # not every release has it
        setattr(owner, name, _saying_what(method, subject))


# ---- ZeRO-3

_names: Any = torch.utils.weak.WeakIdKeyDictionary()
"""Of parameters in their models. DeepSpeed has a list as well, from which a second model removes those of the first."""
_texts: dict[tuple[Any, ...], str] = {}


def _of_zero3_gathers(partitioning: Any) -> None:
    init = partitioning.Init
    _replace(init, "_all_gather", lambda _self, param_list, *_args, **_kwargs: _described("parameter", param_list))
    convert = init._convert_to_deepspeed_param

    @functools.wraps(convert)
    def convert_and_say(self: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
        result = convert(self, param, *args, **kwargs)
        _replace(param, "all_gather_coalesced", lambda params, *_args, **_kwargs: _described("parameter", params))
        return result

    init._convert_to_deepspeed_param = convert_and_say
    engine = sys.modules.get(_ENGINE)
    if hasattr(engine, "debug_extract_module_and_param_names"):
        _remember_names(engine)


def _remember_names(engine: Any) -> None:
    extract = engine.debug_extract_module_and_param_names

    @functools.wraps(extract)
    def extract_and_remember(model: Any) -> None:
        for name, parameter in model.named_parameters():
            _names[parameter] = name
        extract(model)

    engine.debug_extract_module_and_param_names = extract_and_remember


def _of_zero3_gradients(stage3: Any) -> None:
    optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
    subject: Callable[..., str] = lambda _self, params, *_args, **_kwargs: _described("gradient", params)  # noqa: E731
    _replace(optimizer, "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads", subject)


def _described(what: str, parameters: Iterable[Any]) -> str:
    # As DeepSpeed sorts them before it gathers.
    ordered = sorted(parameters, key=lambda parameter: parameter.ds_id)
    key = (what, *(parameter.ds_id for parameter in ordered), *(map(_names.get, ordered)))
    text = _texts.get(key)
    if text is None:
        text = _texts[key] = _text(what, [_named(parameter) for parameter in ordered], key)
    return text


def _named(parameter: Any) -> str:
    name = _names.get(parameter)
    return f"number {parameter.ds_id}" if name is None else f"{name} (number {parameter.ds_id})"


def _text(what: str, names: list[str], key: tuple[Any, ...]) -> str:
    """All of it is compared, and its beginning shown."""
    if len(names) <= 1:
        return f"{what} {''.join(names)}"
    return f"{len(names)} {what}s, the first {names[0]}, the last {names[-1]}: {key}"


# ---- FSDP


def _of_fsdp1_gathers(flat: Any) -> None:
    _replace(
        flat.FlatParamHandle, "_all_gather_flat_param", lambda self, *_args, **_kwargs: _of_handle("parameter", self)
    )


def _of_fsdp1_gradients(runtime: Any) -> None:
    _replace(runtime, "_reduce_grad", lambda _state, handle, *_args, **_kwargs: _of_handle("gradient", handle))


def _of_handle(what: str, handle: Any) -> str:
    names = handle.flat_param._fqns
    key = (what, *names)
    if key not in _texts:
        _texts[key] = _text(what, list(names), key)
    module = handle._fully_sharded_module
    return f"{_texts[key]} of {type(module).__name__}"


def _of_fsdp2(groups: Any) -> None:
    _replace(groups.FSDPParamGroup, "unshard", lambda self, *_args, **_kwargs: _of_group("parameters", self))
    _replace(groups.FSDPParamGroup, "post_backward", lambda self, *_args, **_kwargs: _of_group("gradients", self))


def _of_group(what: str, group: Any) -> str:
    module = group.modules[0] if getattr(group, "modules", None) else None
    name = group._module_fqn or "the model"
    return f"{what} of {name} ({type(module).__name__})"
