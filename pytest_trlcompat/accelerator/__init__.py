"""A software accelerator: a PyTorch device in host memory, so that a machine without GPUs shows placement bugs.

Tensors on it carry another device than the CPU's, kernels are the CPU's on the same memory, and collectives are
gloo's, completed in order. It goes by the name ``npu``, with a stand-in for the package ``torch_npu``, because that
makes Accelerate, Transformers and DeepSpeed take it for a real accelerator, unpatched: distributed type ``MULTI_NPU``,
backend ``hccl``.

``TRLCOMPAT_ACCELERATOR_TRACE=1`` makes the device print each operator that falls back to the CPU's kernel, on stderr.

Libraries have branches for NPUs that a GPU never takes. All of them are known: ``branches.py`` finds them in the
source, ``npu_branches.toml`` says what is done about each, and
``standin/torch_npu/_as_cuda.py`` makes libraries behave as on CUDA where that is needed. ``artefacts.py`` recognises
failures in such a branch, or of a missing kernel. Consider the limits listed there before you believe a failure on
this device.
With ``attn_implementation="eager"`` forward, backward, AdamW and greedy generation equal the CPU's bitwise.

This module and build.py must not import torch: importing the plugin must neither load torch nor the device. The device
is loaded only by ``activate``, and by ``environment`` in a child process.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType

from pytest_trlcompat.accelerator.build import (
    DEVICES_VARIABLE,
    AcceleratorError,
    build,
    child_variables,
)

__all__ = ["AcceleratorError", "activate", "build", "environment", "show_devices"]


def environment(devices: int = 2) -> dict[str, str]:
    """Environment variables to add for a child Python, so that it has ``devices`` software accelerators.

    Builds the accelerator if necessary. ``import torch`` in the child loads it. Real GPUs are hidden from the child.

    Raises:
        AcceleratorError: there cannot be as many devices, or the build fails.
    """
    _check_count(devices)
    return child_variables(build(), devices)


def activate(devices: int = 2) -> None:
    """Give the running process ``devices`` software accelerators, from ``npu:0`` on. A second call changes nothing.

    Processes that are forked from this one have them too, as long as it has run no backward pass itself: PyTorch's
    backward threads do not survive a fork.

    Raises:
        AcceleratorError: torch has a real accelerator, this process has another number of devices, or the build fails.
    """
    _check_count(devices)
    import torch

    if not getattr(sys.modules.get("torch_npu"), "IS_SOFTWARE_ACCELERATOR", False):
        folder = str(build())
        _refuse_beside_real_accelerator(torch, folder)
        # Before the import, during which it is read.
        os.environ[DEVICES_VARIABLE] = str(devices)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        # The folder may have been made after Python had listed what is on its path.
        importlib.invalidate_caches()
        importlib.import_module("torch_npu")
    count = torch.npu.device_count()
    if count != devices:
        raise AcceleratorError(
            f"{devices} software accelerators were requested, but this process already has {count}: their number "
            "cannot change in a process. Request the same number, or start another process."
        )


def show_devices(count: int) -> None:
    """Leave the running process only the first ``count`` devices, as CUDA_VISIBLE_DEVICES does before CUDA starts.

    For ranks that are forked from a process with more of them.

    Raises:
        RuntimeError: the process has fewer devices.
    """
    importlib.import_module("torch_npu")._C.show_devices(count)


def _current_accelerator(torch: ModuleType) -> object | None:
    if not hasattr(torch, "accelerator"):  # before 2.6
        return torch.device("cuda") if torch.cuda.is_available() else None
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _check_count(devices: int) -> None:
    if not 1 <= devices <= 127:  # PyTorch counts devices in a signed byte
        raise AcceleratorError(f"{devices} software accelerators were requested; there can be 1 to 127 of them.")


def _refuse_beside_real_accelerator(torch: ModuleType, standin: str) -> None:
    """Raise if torch has another accelerator: a test might then run on either."""
    installed = importlib.util.find_spec("torch_npu")
    # The stand-in is found under this name as well, where it is on the path already.
    if hasattr(torch, "npu") or (installed is not None and not str(installed.origin).startswith(standin)):
        raise AcceleratorError(
            "The software accelerator goes by the name npu, but this environment has a real torch_npu. "
            "Test on that one (device auto), or in an environment without it."
        )
    device = _current_accelerator(torch)
    if device is not None:
        raise AcceleratorError(
            f"The software accelerator was requested, but torch sees a real one ({device}). Test on that one "
            f"(--trlcompat-device {device}), or hide it before Python starts, for CUDA with CUDA_VISIBLE_DEVICES=''."
        )
