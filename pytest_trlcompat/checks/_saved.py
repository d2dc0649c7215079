"""Tensors of a saved folder, read one at a time: safetensors, ``.bin``, shards of either, adapters, FSDP's own files.

Pickles are read with ``weights_only=True``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["SavedTensors", "open_saved"]


class SavedTensors(Protocol):
    """What a folder holds.

    Attributes:
        source: the file or folder that is read, for messages.
        is_adapter: whether it holds only the tensors of a PEFT adapter.
        names: of all tensors.
    """

    source: Path
    is_adapter: bool
    names: frozenset[str]

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""


def open_saved(folder: Path) -> SavedTensors | None:
    """The weights in ``folder``, or ``None`` if it has none from which a whole model can be read.

    The names are those of Transformers, PEFT and Accelerate: ``adapter_model.*``, ``model.safetensors``,
    ``pytorch_model.bin``, both with ``.index.json``, ``pytorch_model_fsdp.bin`` and ``pytorch_model_fsdp_0``.

    Raises:
        OSError, ValueError: a file is there and cannot be read.
    """
    for name, source in _KINDS:
        if (folder / name).exists():
            return source(folder / name)
    return None


class _Files:
    """Tensors in one or several files; the last file that was read stays open."""

    def __init__(self, source: Path, files: Mapping[str, Path]) -> None:
        self.source = source
        self.is_adapter = source.name.startswith("adapter_model.")
        self.names = frozenset(files)
        self._files = files
        self._open: tuple[Path, Any] | None = None

    def read(self, name: str) -> Tensor:
        path = self._files[name]
        if self._open is None or self._open[0] != path:
            self._open = None  # let go of the last one first
            self._open = path, _open_file(path)
        opened = self._open[1]
        tensor: Tensor = opened[name] if isinstance(opened, Mapping) else opened.get_tensor(name)
        return tensor


def _one_file(path: Path) -> _Files:
    opened = _open_file(path)
    return _Files(path, dict.fromkeys(opened.keys(), path))


def _indexed(path: Path) -> _Files:
    weight_map = json.loads(path.read_text())["weight_map"]
    return _Files(path, {name: path.parent / file for name, file in weight_map.items()})


def _open_file(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        return safe_open(path, framework="pt", device="cpu")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # the format of torch before 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)


class _DistributedCheckpoint:
    """A folder of ``torch.distributed.checkpoint``, as Accelerate writes for ``SHARDED_STATE_DICT``."""

    is_adapter = False

    def __init__(self, source: Path) -> None:
        from torch.distributed.checkpoint import FileSystemReader

        self.source = source
        stored = FileSystemReader(source).read_metadata().state_dict_metadata
        # Accelerate puts the model under "model"; what has no size is no tensor.
        self._stored = {name: entry for name, entry in stored.items() if hasattr(entry, "size")}
        self.names = frozenset(name.removeprefix("model.") for name in self._stored)

    def read(self, name: str) -> Tensor:
        from torch.distributed.checkpoint import FileSystemReader, load

        key = f"model.{name}"
        entry = self._stored[key]
        target = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        load(target, storage_reader=FileSystemReader(self.source), no_dist=True)
        return target[key]


# The first that is there counts, as from_pretrained and Accelerate have it.
_KINDS = (
    ("adapter_model.safetensors", _one_file),
    ("adapter_model.bin", _one_file),
    ("model.safetensors", _one_file),
    ("model.safetensors.index.json", _indexed),
    ("pytorch_model.bin", _one_file),
    ("pytorch_model.bin.index.json", _indexed),
    ("pytorch_model_fsdp.bin", _one_file),
    ("pytorch_model_fsdp_0", _DistributedCheckpoint),
)
