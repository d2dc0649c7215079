"""Lets vLLM on a CPU take new weights, as trainers that generate with it need.

After loading a model, vLLM's layers for CPUs pack their weights for their kernels and drop the originals, so that a
trainer's first synchronisation ends with ``'Parameter' object has no attribute 'weight_loader'``. Here they keep them
and multiply by ``torch.nn.functional.linear``, as vLLM itself does for layers that it marks. Also, neither the model
nor the functions that sample are compiled: that would take most of a short training, and minutes on a busy machine.

vLLM calls :func:`install` in each of its processes (entry point ``vllm.general_plugins``). It acts in ranks alone: see
:data:`.environment.ON_CPU`.
"""

from __future__ import annotations

import functools
import importlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_trlcompat.inference import engine_weights, gloo_transfer
from pytest_trlcompat.inference.environment import ON_CPU

__all__ = ["changes", "install"]


_EXPERTS = (
    ("vllm.model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts"),
    ("vllm.model_executor.layers.fused_moe.cpu_fused_moe", "CPUFusedMOE"),
)
"""What computes a mixture of experts, in later releases of vLLM and in earlier ones."""


@dataclass
class _Changes:
    kept_layers: int = 0
    eager_engines: int = 0
    missing: list[str] = field(default_factory=list)
    missing_experts: list[str] = field(default_factory=list)
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
        _keep_experts()
        _do_not_compile()
        _open_no_port()
        _share_memory_by_names_of_its_own()
        gloo_transfer.adapt_server()
        _offer_weights()


def changes() -> dict[str, Any]:
    """What differs from an engine of vLLM's own in this process, for evidence.

    Returns:
        ``kept_layers``: layers that keep their weights as they were loaded; ``eager_engines``: engines that were not
        compiled; ``missing``: names that this release of vLLM does not have, so that nothing was changed there;
        ``missing_experts``: the same of what mixtures of experts alone need.
    """
    return {
        "kept_layers": _changes.kept_layers,
        "eager_engines": _changes.eager_engines,
        "missing": list(_changes.missing),
        "missing_experts": list(_changes.missing_experts),
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
        # No linear layer: vLLM looks at each kind by itself.
        if layer.weight.ndim != 2:
            pack(layer, *args, **kwargs)
            return
        layer.cpu_linear = torch.nn.functional.linear
        _changes.kept_layers += 1

    # Its callers look the name up in this module whenever they call it.
    setattr(utils, name, keep)


def _keep_experts() -> None:
    """The same for mixtures of experts: their layers' kernels take packed weights alone, and are replaced as well."""
    later, earlier = (_found(*place) for place in _EXPERTS)
    if later is not None:
        later.process_weights_after_loading = _count_experts
        later.apply = _apply_experts
    elif earlier is not None:
        # It multiplies by torch.nn.functional.linear, expert by expert.
        begin = earlier.init_moe_torch

        @functools.wraps(begin)
        def keep(self: Any, layer: Any) -> None:
            begin(self, layer)
            if layer.w13_weight.numel():
                _changes.kept_layers += 1
            else:  # on some processors they are packed here as well
                _changes.missing_experts.append("expert weights that stay as they are on this processor")

        earlier.init_moe_torch = keep
        # Its kernel takes packed weights alone.
        earlier.check_grouped_gemm = lambda self, layer: (False, "none")
    else:
        _changes.missing_experts.extend(".".join(place) for place in _EXPERTS)


def _found(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def _count_experts(self: Any, layer: Any) -> None:
    # The method that this replaces sets it: whether AMD's own kernel computes, on a Zen processor.
    self._use_zentorch = False
    _changes.kept_layers += 1


def _apply_experts(
    self: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    global_num_experts: int,
    expert_map: Any,
    a1q_scale: Any,
    a2_scale: Any,
    workspace13: Any,
    workspace2: Any,
    expert_tokens_meta: Any,
    apply_router_weight_on_input: bool,
) -> None:
    """``output[t] = sum over t's experts e of weight * w2[e] (silu(gate) * up)``, with ``gate, up = w1[e] x[t]``.

    Args:
        output, hidden_states: ``(T, H)``.
        w1: ``(E, 2 I, H)``.
        w2: ``(E, H, I)``.
        topk_weights, topk_ids: ``(T, K)``.

    Raises:
        NotImplementedError: the layer is another one than this computes.
    """
    import torch

    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    biases = (self.w1_bias, self.w2_bias)
    if activation.value != "silu" or expert_map is not None or any(bias is not None for bias in biases):
        raise NotImplementedError(
            "on a CPU this package computes experts with SiLU alone, without biases, all in one rank"
        )
    output.zero_()
    for expert in topk_ids.unique().tolist():
        tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
        outputs = linear(silu(gate) * up, w2[expert])
        if not apply_router_weight_on_input:
            outputs = outputs * topk_weights[tokens, places, None].to(outputs.dtype)
        output.index_add_(0, tokens, outputs)


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
    # Functions that were decorated when vLLM was imported, such as those of log-probabilities; some releases try them
    # while the engine is made.
    for name in ("__init__", "step", "step_with_batch_queue"):
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
            # vLLM then finds a default group, and opens no port for one.
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        return begin(world_size, *args, **kwargs)

    gpu_worker.init_distributed_environment = alone


def _share_memory_by_names_of_its_own() -> None:
    """Let each engine with tensor parallelism name its shared memory, and take the names away when all parts have it.

    Where ranks have an engine's parts (``external_launcher``), vLLM names it as every other such engine on the machine:
    by the last part of the address ``env://``. Who comes second cannot create it (errno 17), and what a process leaves
    behind that was killed, or has ended as ranks do, is in the way of all later ones.
    """
    from torch import distributed
    from vllm.distributed.device_communicators import cpu_communicator

    shared: Any = getattr(cpu_communicator, "_CPUSHMDistributed", None)
    begin: Callable[[Any], int] | None = getattr(shared, "_init_cpu_shm", None)
    if begin is None:
        return
    join = begin

    @functools.wraps(join)
    def named(self: Any) -> int:
        group = self.communicator.device_group
        name = [f"trlcompat-{uuid.uuid4().hex}"]
        distributed.broadcast_object_list(name, src=self.communicator.ranks[0], group=group)
        self.group_name = name[0]
        handle = join(self)  # returns when all have joined
        Path("/dev/shm", f"{name[0]}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    shared._init_cpu_shm = named


def _offer_weights() -> None:
    from vllm import LLM
    from vllm.v1.worker.gpu_worker import Worker

    engine_weights.offer(Worker, LLM)
