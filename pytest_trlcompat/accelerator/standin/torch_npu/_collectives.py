"""The process group backend ``hccl``: gloo's collectives on the device's memory, in order.

Ranks compare what each is about to do: a mismatch fails at once and names both, where it would otherwise wait for the
timeout, abort a rank, or pass.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_npu import _C, _notes_file, _peers

__all__ = ["register"]

# For the project's own test alone, which shows what ordering is for: collectives then complete as gloo's do.
UNORDERED_VARIABLE = "TRLCOMPAT_UNORDERED_COLLECTIVES"
# For measuring what comparing costs.
COMPARE_VARIABLE = "TRLCOMPAT_COMPARE_COLLECTIVES"
# How long a rank waits before it looks whether another one disagrees. It costs nothing where nobody waits that long.
PATIENCE = timedelta(milliseconds=500)


def register() -> None:
    dist.Backend.register_backend("hccl", _create, devices=["npu"])
    if torch.__version__ < (2, 7):
        _bind_to_no_device()


def _bind_to_no_device() -> None:
    """Ignore a ``device_id``, which means nothing to gloo: gloo connects at once in any case.

    DeepSpeed 0.17.3 to 0.17.5 binds its process group to its device. Before torch 2.7 that can be CUDA's alone.
    """
    start = dist.init_process_group

    @functools.wraps(start)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        device = kwargs.get("device_id")
        if device is not None and device.type == "npu":
            del kwargs["device_id"]
        start(*args, **kwargs)

    # Both names, since torch.distributed re-exports it.
    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group


def _create(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    ordered = os.environ.get(UNORDERED_VARIABLE, "0") in ("", "0")
    comparing = os.environ.get(COMPARE_VARIABLE, "1") not in ("", "0")
    with _peers.only_own():
        gloo = _gloo(store, rank, world_size, timeout)
    # No rank ends before all have looked at their peers, since each waits for the others here.
    notes = _notes(store, rank, world_size) if comparing and world_size > 1 else None
    try:
        patience = PATIENCE // timedelta(milliseconds=1)
        return _C.new_backend(gloo, ordered, comparing, -1 if notes is None else notes, patience)
    finally:
        if notes is not None:
            os.close(notes)


def _notes(store: dist.Store, rank: int, world_size: int) -> int | None:
    """A file that all ranks of the group have open and nobody else finds.

    Returns:
        Its descriptor; ``None`` where the ranks are on several machines, or the first one could not write it.
    """
    size = _C.notes_bytes(world_size)
    if rank == 0:
        descriptor, name = _notes_file.create(size)
        store.set("trlcompat/notes", name)
    else:
        name = store.get("trlcompat/notes").decode("ascii", "replace")
        descriptor = _notes_file.open_existing(name, size)
    # Before this rank counts as one that has looked, so that the last to look knows of every miss.
    if descriptor < 0:
        store.add("trlcompat/notes/missed", 1)
    if store.add("trlcompat/notes/looked", 1) == world_size:
        store.set("trlcompat/notes/shared", str(store.add("trlcompat/notes/missed", 0) == 0))
    shared = store.get("trlcompat/notes/shared") == b"True"
    if rank == 0 and name:
        # All that could open it have done so: the answer above comes after the last of them.
        _notes_file.remove(name)
    if not shared and descriptor >= 0:
        os.close(descriptor)
    return descriptor if shared else None


def _gloo(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    # All ranks are on this host. Left to itself gloo resolves the host's name, which fails on many a laptop.
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, world_size, options)
