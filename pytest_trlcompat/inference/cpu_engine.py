"""Lets vLLM on a CPU take new weights, as trainers that generate with it need.

After loading a model, vLLM's layers for CPUs pack their weights for their kernels and drop the originals, so that a
trainer's first synchronisation ends with ``'Parameter' object has no attribute 'weight_loader'``. Here they keep them
and multiply by ``torch.nn.functional.linear``, as vLLM itself has it for layers that it marks. Besides, nothing is
compiled, neither the model nor the functions that sample, which would take most of a short training, and minutes of a
busy machine.

vLLM calls :func:`install` in each of its processes (entry point ``vllm.general_plugins``). It acts in ranks alone: see
:data:`.environment.ON_CPU`. Imports torch and vLLM inside functions.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pytest_trlcompat.inference import engine_weights, gloo_transfer
from pytest_trlcompat.inference.environment import ON_CPU

__all__ = ["changes", "install"]


@dataclass
class _Changes:
    kept_layers: int = 0
    eager_engines: int = 0
    missing: list[str] = field(default_factory=list)
    installed: bool = False


_changes = _Changes()


def install() -> None:
    """Change vLLM in this process, once, if it is a rank whose engine runs on the CPU."""
    if os.environ.get(ON_CPU) != "1" or _changes.installed:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _changes.installed = True
        _keep_weights()
        _do_not_compile()
        _open_no_port()
        gloo_transfer.adapt_server()
        _offer_weights()


def changes() -> dict[str, Any]:
    """What differs from an engine of vLLM's own in this process, for evidence.

    Returns:
        ``kept_layers``: layers that keep their weights as they were loaded; ``eager_engines``: engines that were not
        compiled; ``missing``: names that this release of vLLM does not have, so that nothing was changed there.
    """
    return {
        "kept_layers": _changes.kept_layers,
        "eager_engines": _changes.eager_engines,
        "missing": list(_changes.missing),
    }


def _keep_weights() -> None:
    import torch
    from vllm.model_executor.layers import utils

    name = "dispatch_cpu_unquantized_gemm"
    original: Callable[..., None] | None = getattr(utils, name, None)
    if original is None:
        _changes.missing.append(f"{utils.__name__}.{name}")
        return
    pack = original

    @functools.wraps(pack)
    def keep(layer: Any, *args: Any, **kwargs: Any) -> None:
        if layer.weight.ndim != 2:  # no linear layer; vLLM looks at each kind by itself
            pack(layer, *args, **kwargs)
            return
        layer.cpu_linear = torch.nn.functional.linear
        _changes.kept_layers += 1

    # Its callers look the name up in this module whenever they call it.
    setattr(utils, name, keep)


def _do_not_compile() -> None:
    from torch.compiler import set_stance
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore

    configure = EngineArgs.create_engine_config

    @functools.wraps(configure)
    def eager(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.enforce_eager = True
        _changes.eager_engines += 1
        return configure(self, *args, **kwargs)

    EngineArgs.create_engine_config = eager
    # Functions that were decorated when vLLM was imported, such as those of log-probabilities.
    for name in ("step", "step_with_batch_queue"):
        if (step := getattr(EngineCore, name, None)) is not None:
            setattr(EngineCore, name, set_stance("force_eager")(step))


def _open_no_port() -> None:
    """Let an engine that is alone meet itself in memory.

    vLLM would listen on a port of all addresses, which TRL chooses before: two trainings at a time may choose the same.
    """
    from torch import distributed
    from vllm.v1.worker import gpu_worker  # the CPU's worker calls it there

    begin = gpu_worker.init_distributed_environment

    @functools.wraps(begin)
    def alone(world_size: int, *args: Any, **kwargs: Any) -> Any:
        if world_size == 1 and os.environ.get("WORLD_SIZE", "1") == "1" and not distributed.is_initialized():
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        return begin(world_size, *args, **kwargs)

    gpu_worker.init_distributed_environment = alone


def _offer_weights() -> None:
    from vllm import LLM
    from vllm.v1.worker.gpu_worker import Worker

    engine_weights.offer(Worker, LLM)
