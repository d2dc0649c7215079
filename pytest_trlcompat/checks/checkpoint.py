"""Does a checkpoint reload equal? Every tensor in the folder, bitwise, against the live policy.

Known bugs that it catches: trl 2122 and 2885 and the workaround that saves every tensor of a ZeRO-3 model with size 0;
a ``save_model`` under FSDP that writes nothing. Imports torch, and of this package the modules with an underscore.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pytest_trlcompat.checks._models import named_parameters, unwrapped, whole_tensors
from pytest_trlcompat.checks._ranks import CheckError, is_first_rank, listed, together
from pytest_trlcompat.checks._saved import SavedTensors, open_saved

__all__ = ["check_checkpoint"]


def check_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, *, prefix: str = "", cast: bool = False
) -> dict[str, Any]:
    """Compare the weights saved in ``folder`` with those of the live ``model``, tensor by tensor and bitwise.

    Collective where there are several ranks. The model is gathered one tensor at a time (FSDP1: one unit), and the
    first rank reads the folder, one tensor at a time (``.bin``: mapped, one file at a time).

    Args:
        folder: what ``save_model`` or a checkpoint has written: safetensors or ``.bin``, whole or in shards, a PEFT
            adapter, or FSDP's own files. Several at once are there: the first that ``from_pretrained`` would take.
        model: the trained model, wrapped and sharded as training has it.
        prefix: of the part that was saved, which the folder's names lack: ``"policy."`` for TRL's PPO, which saves
            that of a policy and a value model.
        cast: compare after casting the live tensor to the saved type, for copies saved in another type on purpose.

    Returns:
        ``source`` (path), ``tensors`` (number compared) and ``bytes`` (of the saved ones), the same on every rank but
        the first 0.

    Raises:
        CheckError: on every rank: no weights in the folder, or tensors missing, unexpected, empty (size 0), or
            different in shape, type or value, each named, with the largest difference.
    """
    trained = {name.removeprefix(prefix) for name, parameter in named_parameters(model) if parameter.requires_grad}
    comparison = _Comparison(Path(folder), _part(model, prefix), trained, cast)
    with together(f"the checkpoint {folder}"):
        if is_first_rank():
            comparison.open()
    for name, first, tensor in whole_tensors(model, prefix):
        if is_first_rank():
            comparison.add(name.removeprefix(prefix), first.removeprefix(prefix), tensor)
    with together(f"the checkpoint {folder}"):
        if is_first_rank():
            comparison.finish()
    return comparison.summary()


@dataclass
class _Comparison:
    """What the first rank finds. :meth:`add` never raises: other ranks would wait in the next gathering."""

    folder: Path
    model: Any
    trained: set[str]
    cast: bool
    saved: SavedTensors | None = None
    is_adapter: bool = False
    """Whether the folder holds an adapter alone, as PEFT's files do, and those that Accelerate makes of one."""
    live: dict[str, str] = field(default_factory=dict)
    """Names of live tensors, with the first name of the same tensor: of tied ones a folder needs one alone."""
    found: dict[str, str] = field(default_factory=dict)
    """Names in the folder that were compared, with the first name of the live tensor."""
    absent: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    error: Exception | None = None
    bytes: int = 0

    def open(self) -> None:
        if not self.folder.is_dir():
            raise CheckError(f"expected a checkpoint in {self.folder}, but there is no such folder")
        self.saved = open_saved(self.folder)
        if self.saved is None:
            inside = ", ".join(sorted(entry.name for entry in self.folder.iterdir())) or "nothing"
            raise CheckError(
                f"expected saved weights in {self.folder}, but it contains none that can be "
                f"loaded as a whole; it holds {inside}. Under FSDP set the state dict type to FULL_STATE_DICT, under "
                "ZeRO-3 stage3_gather_16bit_weights_on_model_save to true, before saving"
            )

        adapter = self._adapter()
        has_adapter = bool(getattr(self.model, "peft_config", None))
        named = any(adapter in name.split(".") for name in self.saved.names)
        self.is_adapter = self.saved.is_adapter or (has_adapter and not named)

    def add(self, name: str, first: str, tensor: Tensor) -> None:
        if self.error is None and self.saved is not None:
            try:
                self._add(self.saved, name, first, tensor)
            except Exception as error:
                self.error = error

    def _add(self, saved: SavedTensors, name: str, first: str, tensor: Tensor) -> None:
        self.live[name] = first
        keys = _adapter_keys(name, self._adapter()) if self.is_adapter else [name]
        key = next((key for key in keys if key in saved.names), None)
        if key is not None:
            self.found[key] = first
            stored = saved.read(key)
            self.bytes += stored.numel() * stored.element_size()
            self._compare(key, stored, tensor)
        elif not self.is_adapter or self._adapter() in name.split(".") or name in self.trained:
            self.absent.append(name)  # an adapter's folder leaves out what was not trained

    def _compare(self, name: str, stored: Tensor, live: Tensor) -> None:
        if self.cast:
            live = live.to(stored.dtype)
        if stored.numel() == 0 and live.numel():
            self.empty.append(f"{name} {tuple(stored.shape)} instead of {tuple(live.shape)}")
        elif stored.shape != live.shape:
            self.different.append(f"{name} (shape {tuple(stored.shape)} instead of {tuple(live.shape)})")
        elif stored.dtype != live.dtype:
            self.different.append(f"{name} (type {stored.dtype} instead of {live.dtype})")
        elif not _same_bits(stored, live := live.cpu()):
            largest = (stored.double() - live.double()).abs().max().item()
            self.different.append(f"{name} (by {largest:.3g} at most)")

    def _adapter(self) -> str:
        """The adapter that the folder itself holds; those with other names are in folders beneath."""
        adapters = list(getattr(self.model, "peft_config", {}) or {})
        return "default" if "default" in adapters or not adapters else str(adapters[0])

    def finish(self) -> None:
        saved = self.saved
        if saved is None:
            return
        if self.error is not None:
            raise CheckError(
                f"{saved.source} cannot be read: {type(self.error).__name__}: {self.error}"
            ) from self.error
        missing, unexpected = self._missing(), sorted(saved.names - set(self.found))
        if (missing or unexpected) and _renames_on_save(self.model):
            # Which live tensors make up which saved ones is known to Transformers alone.
            warnings.warn(
                f"Transformers saves this model under other names than it has live: {len(self.found)} tensors of "
                f"{saved.source} were compared, {len(unexpected)} were not",
                stacklevel=2,
            )
            missing, unexpected = [], []
        kinds = {"missing": missing, "unexpected": unexpected, "empty": self.empty, "different": self.different}
        problems = [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]
        if problems:
            raise CheckError(
                f"{saved.source} does not reload as the live model, of which {len(self.live)} tensors were expected: "
                + "; ".join(problems)
                + ". Do not train on from it: save a gathered state dict (accelerator.get_state_dict of the wrapped "
                "model) and compare again"
            )

    def _missing(self) -> list[str]:
        ignored = set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())
        there = set(self.found.values())
        return [name for name in self.absent if self.live[name] not in there and name not in ignored]

    def summary(self) -> dict[str, Any]:
        source = None if self.saved is None else str(self.saved.source)
        return {"source": source, "tensors": len(self.found), "bytes": self.bytes}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, so that NaN equals itself and 0 differs from -0."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _keys(name: str) -> Iterator[str]:
    """What PEFT may call a live tensor in a file; models that it was injected into lack its prefix."""
    yield name
    if not name.startswith("base_model.model."):
        yield f"base_model.model.{name}"


def _adapter_keys(name: str, adapter: str) -> list[str]:
    """What PEFT may call the tensor of an adapter in the adapter's file, which leaves out the adapter's name."""
    plain = ".".join(part for part in name.split(".") if part not in (adapter, "modules_to_save"))
    names = [name, plain, plain.removesuffix(".weight")]  # DoRA's magnitudes lose their suffix as well
    return [key for each in names for key in _keys(each)]


def _part(model: nn.Module, prefix: str) -> nn.Module:
    """The module whose parameters' names begin with ``prefix``, without wrappers."""
    model = unwrapped(model)
    for name in filter(None, prefix.split(".")):
        model = unwrapped(getattr(model, name))
    return model


def _renames_on_save(model: Any) -> bool:
    """Whether Transformers stores this model's tensors under other names than the model has."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, "_checkpoint_conversion_mapping", None):  # Transformers 4.52 to 4.57
        return True
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping  # Transformers 5

        return bool(get_model_conversion_mapping(base, add_legacy=False))
    except Exception:  # no such function, or the model is none of Transformers': names are what they are
        return False
