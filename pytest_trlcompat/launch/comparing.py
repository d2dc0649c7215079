"""Ranks on the plain CPU compare what each is about to do, so that mismatched collectives fail at once and name both.

PyTorch has a wrapper of process groups that does this. ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` would turn it on, but must
not be set: with torch 2.13 the constructor of DDP then ends with SIGSEGV in ``c10d::Logger::set_env_variables``, which
looks up the group's backend of type GLOO and takes the wrapper for gloo's own class. Therefore each group is wrapped
here. Collectives are dispatched by the device of their tensors and go through the wrapper, while a look-up by type
finds gloo itself. The software accelerator makes its own comparison, at less cost. With NCCL the wrapper would be
expensive.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["compare_collectives"]


def compare_collectives() -> None:
    """Wrap every process group of gloo that this process makes from now on.

    Warns where this release of PyTorch makes groups in another way, so that nothing compares them.
    """
    if "torch.distributed" not in sys.modules or not sys.modules["torch.distributed"].is_available():
        return  # an environment without PyTorch, or a build without process groups
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    needed = ("_new_process_group_helper", "_create_process_group_wrapper")
    lacking = [name for name in needed if not hasattr(c10d, name)]
    if lacking:
        warnings.warn(
            f"this release of PyTorch has no {', '.join(lacking)}: ranks on the CPU do not compare their collectives, "
            "and those that disagree wait for the timeout",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    wrappers: list[Any] = []
    c10d._create_process_group_wrapper = _set_apart(c10d._create_process_group_wrapper, wrappers)
    c10d._new_process_group_helper = _compared(c10d._new_process_group_helper, wrappers)


def _set_apart(wrap: Callable[..., Any], wrappers: list[Any]) -> Callable[..., Any]:
    """Have PyTorch register gloo itself for the group, and keep the wrapper for what follows."""

    @functools.wraps(wrap)
    def wrap_apart(wrapped_pg: Any, *args: Any, **kwargs: Any) -> Any:
        wrappers.append(wrap(wrapped_pg, *args, **kwargs))
        return wrapped_pg

    return wrap_apart


def _compared(build: Callable[..., Any], wrappers: list[Any]) -> Callable[..., Any]:
    import torch
    import torch.distributed as dist

    @functools.wraps(build)
    def build_compared(*args: Any, **kwargs: Any) -> Any:
        level = dist.get_debug_level()
        # One may be left of a group whose construction failed.
        wrappers.clear()
        # Only while the group is built: PyTorch asks for the level there, and wraps gloo where it is DETAIL.
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            group, store = build(*args, **kwargs)
        finally:
            dist.set_debug_level(level)
        # A rank that is no member of the group has no wrapper.
        if wrappers:
            # Under another type than gloo's, since a type that a group has already is not registered again.
            kind = dist.ProcessGroup.BackendType.CUSTOM
            group._register_backend(torch.device("cpu"), kind, wrappers.pop())
        return group, store

    return build_compared
