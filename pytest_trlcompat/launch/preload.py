"""What the warm server imports before it forks: the stack, and the modules that the stack imports late.

Importing the stack takes ten seconds, a launch half a second. A module that is missing here is imported in each launch.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import pkgutil
import sys
import threading
import time
from collections.abc import Sequence

from pytest_trlcompat import stack
from pytest_trlcompat.launch import cuda
from pytest_trlcompat.launch.own_packages import import_all

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
    # Other late imports of 0.19; setuptools, which older releases import at once, would take 0.25 s in every rank.
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
    "pytest_trlcompat.trainers.corrected:GRPOTrainer",
    "pytest_trlcompat.trainers.corrected:PPOTrainer",
    "pytest_trlcompat.trainers.ppo.ppo_config",
    "pytest_trlcompat.doctor.train_begin",  # what bites a training is told when it begins
    "pytest_trlcompat.launch.proof",
)

_PACKAGES = (*stack.REQUIRED, "safetensors", "tokenizers")


def preload(
    modules: tuple[str, ...] = _MODULES, may_have_cuda: bool = True, project_modules: Sequence[str] = ()
) -> tuple[dict[str, str], dict[str, float]]:
    """Import every module and freeze the heap.

    Returns:
        The errors of modules of the stack that could not be imported, and the seconds that each of the project's took.

    A broken combination of versions must not stop the server: its ranks get the same error in the test's own code.

    Args:
        may_have_cuda: whether there may be a GPU, which must not be initialised before the fork.
        project_modules: packages of the project under test.

    Raises:
        CudaInitialized: an import has initialised it anyway.
        PreloadError: one of ``project_modules`` cannot be imported before the fork.
    """
    errors = {}
    # Imports leave no garbage, and searching for it takes a sixth of their time.
    gc.disable()
    with cuda.without_initialization() if may_have_cuda else contextlib.nullcontext():
        for name in modules:
            try:
                # With a colon at its end, a name is imported as a module; without, its last parts might be attributes.
                pkgutil.resolve_name(name if ":" in name else f"{name}:")
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"
            # After each of them, so that the error names the import that has done it.
            if may_have_cuda:
                cuda.check_uninitialized(f"importing {name}")
        seconds = import_all(project_modules)
        _load_auto_mappings()
        _cache_metadata()
        _build_conversion_mapping()
        _use_thread_lock_in_tqdm()
        _probe_operators()
        if may_have_cuda:
            cuda.check_uninitialized("preparing the server")
    # Ranks then neither scan nor copy the stack's objects; DeepSpeed's see_memory_usage runs full collections.
    gc.freeze()
    gc.enable()
    return errors, seconds


def _probe_operators() -> None:
    """Have DeepSpeed find out which of its operators can be built, for which it runs a compiler; it caches the answer.

    Older releases do so on import, 0.19.8 on first use, that is in every rank.
    """
    with contextlib.suppress(Exception):  # ranks get the same error
        getattr(sys.modules["deepspeed"].ops, "__compatible_ops__", None)


def _use_thread_lock_in_tqdm() -> None:
    """Spare each rank an additional process, which takes a tenth of its time.

    By default, tqdm uses a lock between processes, which ranks do not need. With ``spawn``, which DeepSpeed 0.17.1 and
    0.17.2 select on import, Python starts a process that tracks this lock. See
    ``set_lock`` in https://tqdm.github.io/docs/tqdm/.
    """
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None:
        tqdm.tqdm.set_lock(threading.RLock())


def _load_auto_mappings() -> None:
    """Load the two hundred configuration modules that the first use of an auto class loads, for policies and for
    reward and value models."""
    auto = sys.modules.get("transformers.models.auto.modeling_auto")
    if auto is not None:
        list(auto.AutoModelForCausalLM._model_mapping.keys())
        list(auto.AutoModelForSequenceClassification._model_mapping.keys())


def _cache_metadata() -> None:
    """Read the metadata of each package once; installed packages do not change while a server runs.

    Accelerate parses them whenever it checks for a package, which takes a tenth of a short launch.
    """
    for name in ("metadata", "version"):
        read = functools.cache(getattr(importlib.metadata, name))
        for package in _PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                read(package)
        setattr(importlib.metadata, name, read)


def _build_conversion_mapping() -> None:
    """Have Transformers 5 compile the nine hundred patterns with which it renames weights when it loads a model."""
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen2")


if __name__ == "__main__":
    started = time.monotonic()
    for _name, _error in preload()[0].items():
        print(f"{_name}: {_error}")
    print(f"{time.monotonic() - started:.1f} s")
