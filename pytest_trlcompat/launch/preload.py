"""What the warm server imports before it forks: the stack, and the modules that the stack imports late.

Imports of the stack take ten seconds, a launch half a second: what is missing here is paid again in every launch.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import sys
import threading
import time

from pytest_trlcompat.launch import cuda

__all__ = ["preload"]

_MODULES = (
    "torch",
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.nn.parallel.distributed",
    "torch.utils.checkpoint",
    "torch.utils.serialization.config",
    "torch.utils.tensorboard",
    "torch._subclasses.schema_check_mode",
    "numpy.ctypeslib",
    "datasets",
    "datasets.arrow_dataset",
    "accelerate",
    "accelerate.utils.fsdp_utils",
    "accelerate.utils.deepspeed",
    "peft",
    "peft.utils.transformers_weight_conversion",
    "transformers",
    "transformers.trainer",
    "transformers.generation.utils",
    "transformers.integrations.deepspeed",
    "transformers.integrations.fsdp",
    "transformers.integrations.integration_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2_fast",
    "transformers.models.mistral.modeling_mistral",
    "transformers.tokenization_utils_fast",
    "deepspeed",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    # DeepSpeed 0.19 imports it at engine construction, and torch inductor with it: five seconds.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    # What 0.19 imports late beside: with setuptools, which older releases import at once, 0.25 s in every rank.
    "setuptools",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "trl",
    "trl.models.utils",
    "trl.trainer.grpo_trainer",
    "trl.trainer.grpo_config",
    "trl.trainer.ppov2_trainer",
    "trl.trainer.ppo_trainer",
    "trl.experimental.ppo",
    "pytest_trlcompat.tiny",
    "pytest_trlcompat.trainers.grpo",
    "pytest_trlcompat.trainers.ppo",
    "pytest_trlcompat.launch.proof",
)

_ASKED_FOR = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "trl",
    "datasets",
    "safetensors",
    "tokenizers",
)


def preload(modules: tuple[str, ...] = _MODULES, may_have_cuda: bool = True) -> dict[str, str]:
    """Import every module and freeze the heap; return the error texts of those that could not be imported.

    A broken combination of versions must not stop the server: its ranks meet the same error in the test's own code.

    Args:
        may_have_cuda: whether there may be a GPU, which must not be touched before the fork.

    Raises:
        CudaInitialized: an import has touched it all the same.
    """
    errors = {}
    gc.disable()  # nothing of what imports make is garbage: to look for some takes a sixth of their time
    with cuda.left_alone() if may_have_cuda else contextlib.nullcontext():
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"
            if may_have_cuda:
                cuda.check_left_alone(f"importing {name}")
        _load_auto_mappings()
        _remember_metadata()
        _build_conversion_mapping()
        _lock_bars_among_threads()
        _probe_operators()
        if may_have_cuda:
            cuda.check_left_alone("preparing what launches share")
    # Ranks then neither scan nor copy the stack's objects; DeepSpeed's see_memory_usage runs full collections.
    gc.freeze()
    gc.enable()
    return errors


def _probe_operators() -> None:
    """Have DeepSpeed find out which of its operators could be built: it runs a compiler for that, and keeps the answer.

    Older releases do so when they are imported, 0.19.8 when it is first asked, in every rank.
    """
    with contextlib.suppress(Exception):  # ranks meet the same error
        getattr(sys.modules["deepspeed"].ops, "__compatible_ops__", None)


def _lock_bars_among_threads() -> None:
    """Spare each rank a process, a tenth of its time.

    tqdm's own lock is one among processes. Ranks never share it, since each makes its own; but DeepSpeed 0.17.1 and
    0.17.2 choose ``spawn`` when they are imported, and then Python starts a process that tracks the lock. See
    ``set_lock`` in https://tqdm.github.io/docs/tqdm/.
    """
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None:
        tqdm.tqdm.set_lock(threading.RLock())


def _load_auto_mappings() -> None:
    """Load the two hundred configuration modules that the first look-up of an auto class loads: a policy's, and a
    reward or value model's."""
    auto = sys.modules.get("transformers.models.auto.modeling_auto")
    if auto is not None:
        list(auto.AutoModelForCausalLM._model_mapping.keys())
        list(auto.AutoModelForSequenceClassification._model_mapping.keys())


def _remember_metadata() -> None:
    """Have the metadata of each package read once; the installed packages do not change while a server lives.

    Accelerate parses them for every question whether a package is there, which is a tenth of a short launch.
    """
    for name in ("metadata", "version"):
        read = functools.cache(getattr(importlib.metadata, name))
        for package in _ASKED_FOR:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                read(package)
        setattr(importlib.metadata, name, read)


def _build_conversion_mapping() -> None:
    """Have Transformers 5 compile the nine hundred patterns with which it renames weights when it loads a model."""
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen2")


if __name__ == "__main__":
    started = time.monotonic()
    for _name, _error in preload().items():
        print(f"{_name}: {_error}")
    print(f"{time.monotonic() - started:.1f} s")
