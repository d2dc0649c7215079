"""Stand-in for Ascend's torch_npu, under whose name the software accelerator is taken for a real one, unpatched.

Importing it (``import torch`` does, where this folder is on the path, through the entry point ``torch.backends``) makes
``npu:0`` and its fellows usable and adds ``torch.npu`` and the process group backend ``hccl``. It must not be installed
into an environment: on the path of a test's ranks it serves them alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn


def _autoload() -> None:
    """What torch calls when it is imported, also while this package, imported first, imports torch."""


import torch  # noqa: E402

__version__ = "0.0.0"
__all__ = ["IS_SOFTWARE_ACCELERATOR", "npu"]

IS_SOFTWARE_ACCELERATOR = True

# DeepSpeed's builders look this up as soon as they are imported; a version.cfg is all they find in it.
os.environ.setdefault("ASCEND_HOME_PATH", str(Path(__file__).with_name("ascend")))

from torch_npu import _C  # noqa: E402
from torch_npu._missing import lacking  # noqa: E402

_C.register_hooks()
torch.utils.rename_privateuse1_backend("npu")

from torch_npu import _as_cuda, _collectives, _pinning, npu  # noqa: E402

torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=True, for_storage=True)
_pinning.register()
if torch.distributed.is_available():
    _collectives.register()
_as_cuda.install()

# TRL's activation offloading asks torch_npu for what it asks torch for elsewhere.
if hasattr(torch._C, "_storage_Use_Count"):
    _C._storage_Use_Count = torch._C._storage_Use_Count


# Transformers imports these wherever there is an NPU; nothing that is tested may call them.
def npu_rotary_mul(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise NotImplementedError("The software accelerator has no npu_rotary_mul; use attn_implementation='eager'.")


def npu_fusion_attention(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise NotImplementedError("The software accelerator has no npu_fusion_attention; use attn_implementation='eager'.")


__getattr__ = lacking("torch_npu")
