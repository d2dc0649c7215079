"""Does a checkpoint reload equal? Every tensor in the folder, bitwise, against the live policy.

Known bugs that it catches: trl 2122 and 2885 and the workaround that saves every tensor of a ZeRO-3 model with size 0;
a ``save_model`` under FSDP that writes nothing. Imports torch, and of this package the modules with an underscore.

Transformers may store a tensor under another name, or cut in several: :mod:`~pytest_trlcompat.checks._stored`. So every
live tensor is held against what it is stored as, and at the end all elements of either side are accounted for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pytest_trlcompat.checks._models import named_parameters, unwrapped, whole_tensors
from pytest_trlcompat.checks._ranks import CheckError, OddError, is_first_rank, listed, together
from pytest_trlcompat.checks._saved import SavedTensors, open_saved
from pytest_trlcompat.checks._stored import Stored

__all__ = ["check_checkpoint"]


def check_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, *, prefix: str = "", cast: bool = False
) -> dict[str, Any]:
    """Compare the weights saved in ``folder`` with those of the live ``model``, tensor by tensor and bitwise.

    Collective where there are several ranks. The model is gathered one tensor at a time (FSDP1: one unit), and the
    first rank reads the folder, one tensor at a time (``.bin``: mapped, one file at a time). Where Transformers stores
    several live tensors as one, these are kept on the CPU until the last of them has come.

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
        CheckError: on every rank: no weights in the folder, a file that cannot be read, or tensors missing, unexpected,
            empty (size 0), or different in shape, type or value, each named, with the largest difference.
        OddError: on every rank: as many elements are saved as are live, but under names that Transformers' conversion
            does not lead to, so that some were not compared. It says which.
    """
    trained = {name.removeprefix(prefix) for name, parameter in named_parameters(model) if parameter.requires_grad}
    comparison = _Comparison(Path(folder), _part(model, prefix), trained, cast)
    with together(f"the checkpoint {folder}"):
        if is_first_rank():
            with _readable(folder):
                comparison.open()
    for name, first, tensor in whole_tensors(model, prefix):
        if is_first_rank():
            comparison.add(name.removeprefix(prefix), first.removeprefix(prefix), tensor)
    with together(f"the checkpoint {folder}"):
        if is_first_rank():
            comparison.finish()
    return comparison.summary()


@contextmanager
def _readable(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever a broken file makes its reader raise is a finding, and no failure of the check."""
    try:
        yield
    except CheckError:
        raise
    except Exception as error:
        raise CheckError(
            f"expected saved weights in {folder}, but they cannot be read: {type(error).__name__}: {error}"
        ) from error


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
    pending: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Live tensors, on the CPU, of which several may make up the saved one of that name."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Elements of each live tensor."""
    unfollowed: set[str] = field(default_factory=set)
    """Live tensors of which Transformers' conversion did not say what they are stored as."""
    stored: Stored = field(init=False)
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
        self.stored = Stored(self.model, self.saved.names)

    def add(self, name: str, first: str, tensor: Tensor) -> None:
        if self.error is None and self.saved is not None:
            try:
                self._add(self.saved, name, first, tensor)
            except Exception as error:
                self.error = error

    def _add(self, saved: SavedTensors, name: str, first: str, tensor: Tensor) -> None:
        self.live[name], self.sizes[name] = first, tensor.numel()
        keys = _adapter_keys(name, self._adapter()) if self.is_adapter else self.stored.names(name)
        key = next((key for key in keys if key in saved.names), None)
        stored = None if key is None else saved.read(key)
        if key is not None and stored is not None and _same(stored, tensor, self.cast):
            self._count(key, first, stored)
        elif self.is_adapter or not self._add_converted(saved, name, first, tensor):
            if key is not None and stored is not None:
                self._count(key, first, stored)
                self._compare(key, stored, tensor)
            elif not self.is_adapter or self._adapter() in name.split(".") or name in self.trained:
                self.absent.append(name)  # an adapter's folder leaves out what was not trained

    def _add_converted(self, saved: SavedTensors, name: str, first: str, tensor: Tensor) -> bool:
        """Compare what Transformers stores of a live tensor; whether that is anything but the tensor under its name."""
        parts = self.stored.of({name: tensor})
        if parts is None and self.stored.converts:
            self.unfollowed.add(name)
        if parts is None or (len(parts) == 1 and name in parts and parts[name].shape == tensor.shape):
            return parts is not None and self._permuted(saved, name, first, tensor, parts)
        if not any(key in saved.names for key in parts):
            return False
        for key, part in parts.items():
            if key not in saved.names:
                self.live[key], self.sizes[key] = f"{first}: {key}", part.numel()
                self.absent.append(key)
                continue
            stored = saved.read(key)
            if stored.numel() > part.numel() and len(parts) == 1:
                self._collect(key, stored, name, first, tensor)
            else:
                self._count(key, first, stored)
                self._compare(key, stored, part)
        return True

    def _permuted(self, saved: SavedTensors, name: str, first: str, tensor: Tensor, parts: dict[str, Tensor]) -> bool:
        """Whether a tensor is stored under its own name, in another order, and equal so."""
        if name not in saved.names or not _same(stored := saved.read(name), parts[name], self.cast):
            return False
        self._count(name, first, stored)
        return True

    def _collect(self, key: str, stored: Tensor, name: str, first: str, tensor: Tensor) -> None:
        """Keep a live tensor until, with others, it makes up the saved one."""
        waiting = self.pending.setdefault(key, {})
        waiting[name] = tensor.cpu().clone()
        whole = self.stored.of(waiting) if sum(each.numel() for each in waiting.values()) == stored.numel() else None
        if whole is not None and list(whole) == [key]:
            del self.pending[key]
            self._count(key, first, stored)
            self._compare(key, stored, whole[key])

    def _count(self, key: str, first: str, stored: Tensor) -> None:
        self.found[key] = first
        self.bytes += stored.numel() * stored.element_size()

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
        kinds = {"missing": missing, "unexpected": unexpected, "empty": self.empty, "different": self.different}
        problems = [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]
        text = f"{saved.source} does not reload as the live model, of which {len(self.live)} tensors were expected: "
        if problems and not self.empty and not self.different and self._may_be_renamed(saved, missing, unexpected):
            raise OddError(
                f"{saved.source} holds as many elements as the live model, but Transformers stores this model under "
                f"other names than it has live, and its conversion does not lead to them: {len(self.found)} tensors "
                f"were compared. Not compared: live {listed(missing)}, saved {listed(unexpected)}",
                self.summary(),
            )
        if problems:
            raise CheckError(
                text
                + "; ".join(problems)
                + ". Do not train on from it: save a gathered state dict (accelerator.get_state_dict of the wrapped "
                "model) and compare again"
            )

    def _may_be_renamed(self, saved: SavedTensors, missing: list[str], unexpected: list[str]) -> bool:
        """Whether what was not compared is what conversion did not lead to, and as many elements on either side."""
        if not unexpected or not missing or not self.unfollowed.issuperset(missing):
            return False
        return sum(self.sizes[name] for name in missing) == sum(saved.read(name).numel() for name in unexpected)

    def _missing(self) -> list[str]:
        ignored = set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())
        there = set(self.found.values())
        absent = [*self.absent, *(name for waiting in self.pending.values() for name in waiting)]
        return [name for name in absent if self.live[name] not in there and name not in ignored]

    def summary(self) -> dict[str, Any]:
        source = None if self.saved is None else str(self.saved.source)
        return {"source": source, "tensors": len(self.found), "bytes": self.bytes}


def _same(stored: Tensor, live: Tensor, cast: bool) -> bool:
    """Equal in shape, type and every bit."""
    live = live.to(stored.dtype) if cast else live
    return stored.shape == live.shape and stored.dtype == live.dtype and _same_bits(stored, live.cpu())


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
