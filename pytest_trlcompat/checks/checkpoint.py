"""Does a checkpoint reload equal? Every tensor in the folder, bitwise, against the live policy.

Known bugs that it catches: trl 2122 and 2885 and the workaround that saves every tensor of a ZeRO-3 model with size 0;
a ``save_model`` under FSDP that writes nothing.

Transformers may store a tensor under another name, or cut in several: :mod:`~pytest_trlcompat.checks._stored`. So every
live tensor is compared with what it is stored as, and at the end all elements of both sides are accounted for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pytest_trlcompat.checks._adapters import (
    SavedAdapter,
    active_adapter,
    adapter_folders,
    adapter_keys,
    prefixed,
    saved_adapter,
)
from pytest_trlcompat.checks._models import named_parameters, unwrapped, whole_tensors
from pytest_trlcompat.checks._prints import has_bits
from pytest_trlcompat.checks._ranks import CheckError, OddError, is_first_rank, listed, together
from pytest_trlcompat.checks._saved import SavedTensors, open_saved
from pytest_trlcompat.checks._stored import Stored

__all__ = ["check_checkpoint"]

_UNITS = 16
"""Units in the last place of the largest element by which what PEFT computes may differ from what it saved."""


def check_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, *, prefix: str = "", cast: bool = False
) -> dict[str, Any]:
    """Compare the weights saved in ``folder`` with those of the live ``model``, tensor by tensor and bitwise.

    Collective where there are several ranks. The model is gathered one tensor at a time (FSDP1: one unit), and the
    first rank reads the folder, one tensor at a time (``.bin``: mapped, one file at a time). Where Transformers stores
    several live tensors as one, these are kept on the CPU until the last of them has come.

    Args:
        folder: what ``save_model`` or a checkpoint has written: safetensors or ``.bin``, whole or in shards, a PEFT
            adapter, or FSDP's own files. If it has several of these, the one that ``from_pretrained`` would take first
            is read. If the model has several adapters, or one that is not called ``default``, each is read from where
            PEFT saves it, a subfolder; an adapter of which nothing trains may be absent.
        model: the trained model, wrapped and sharded as in training.
        prefix: of the names of the part that was saved, which the folder's names lack: ``"policy."`` for TRL's PPO,
            which trains a policy and a value model and saves only the policy.
        cast: compare after casting the live tensor to the saved type, for copies saved in another type on purpose.

    Returns:
        ``source`` (path), ``tensors`` (number compared) and ``bytes`` (of the saved ones); on ranks other than the
        first these are ``None``, 0 and 0. ``skipped``, if there are any: the names of live tensors without a plain
        storage (torchao's quantised ones), which are not compared.

    Raises:
        CheckError: on every rank: no weights in the folder, a file that cannot be read, or tensors missing, unexpected,
            empty (size 0), or different in shape, type or value, each named, with the largest difference.
        OddError: on every rank: as many elements are saved as are live, but under names that Transformers' conversion
            does not lead to, so that some were not compared; or PEFT computes what it saves of an adapter, which cannot
            be repeated with sharded weights. The message says which.
    """
    trained = {name.removeprefix(prefix) for name, parameter in named_parameters(model) if parameter.requires_grad}
    comparisons: Sequence[_Comparison] = []
    with together(f"the checkpoint {folder}"):
        if is_first_rank():
            with _readable(folder):
                comparisons = _opened(Path(folder), _part(model, prefix), trained, cast)
    for name, first, tensor in whole_tensors(model, prefix):
        for comparison in comparisons:
            comparison.add(name.removeprefix(prefix), first.removeprefix(prefix), tensor)
    with together(f"the checkpoint {folder}"):
        _finish(comparisons)
    return _summary(comparisons)


@contextmanager
def _readable(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever a broken file makes its reader raise is a result of the check, not a failure of it."""
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
    """What the first rank compares. :meth:`add` never raises: other ranks would wait in the next gathering."""

    folder: Path
    model: Any
    trained: set[str]
    """Names of the trainable tensors that the folder has to hold."""
    cast: bool
    saved: SavedTensors
    adapter: str | None = None
    """The only adapter that the folder holds, as PEFT's files do, and those that Accelerate makes of one."""
    expected: SavedAdapter = field(default_factory=SavedAdapter)
    live: dict[str, str] = field(default_factory=dict)
    """Names of live tensors, with the first name of the same tensor: of tied tensors a folder needs only one."""
    compared: dict[str, str] = field(default_factory=dict)
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
    skipped: list[str] = field(default_factory=list)
    """Live tensors without a plain storage, which libraries save in ways of their own."""
    stored: Stored = field(init=False)
    error: Exception | None = None
    bytes: int = 0

    def __post_init__(self) -> None:
        self.stored = Stored(self.model, self.saved.names)

    def add(self, name: str, first: str, tensor: Tensor) -> None:
        if self.error is None:
            try:
                self._add(self.saved, name, first, tensor)
            except Exception as error:
                self.error = error

    def _add(self, saved: SavedTensors, name: str, first: str, tensor: Tensor) -> None:
        if not has_bits(tensor):
            self.skipped.append(name)
            return
        self.live[name], self.sizes[name] = first, tensor.numel()
        key = next((key for key in self._keys(name) if key in saved.names), None)
        stored = None if key is None else saved.read(key)
        if key is not None and stored is not None and _same(stored, tensor, self.cast):
            self._count(key, first, stored)
        elif self.adapter is not None or not self._add_converted(saved, name, first, tensor):
            if key is not None and stored is not None:
                self._count(key, first, stored)
                self._compare(key, stored, tensor)
            elif self._is_expected(name):
                self.absent.append(name)

    def _keys(self, name: str) -> list[str]:
        """What a live tensor may be called in the folder."""
        if self.adapter is None:
            return self.stored.names(name)
        names = self.expected.names
        if names is not None and name in names:
            return prefixed(names[name])
        taken = {*self.expected.computed, *(names or {}).values()}
        return [key for key in adapter_keys(name, self.adapter) if key not in taken]

    def _is_expected(self, name: str) -> bool:
        """An adapter's folder leaves out what was not trained."""
        if self.adapter is None or name in self.trained:
            return True
        names = self.expected.names
        return self.adapter in name.split(".") if names is None else name in names

    def _add_converted(self, saved: SavedTensors, name: str, first: str, tensor: Tensor) -> bool:
        """Compare what Transformers stores of a live tensor. False if that is just the tensor under its own name."""
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
        # A copy, also of a tensor on the CPU: what was gathered may be freed before the others come.
        waiting[name] = tensor.cpu().clone()
        whole = self.stored.of(waiting) if sum(part.numel() for part in waiting.values()) == stored.numel() else None
        if whole is not None and list(whole) == [key]:
            del self.pending[key]
            self._count(key, first, stored)
            self._compare(key, stored, whole[key])

    def _count(self, key: str, first: str, stored: Tensor) -> None:
        self.compared[key] = first
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

    def problems(self) -> list[str]:
        """What is wrong with the folder, in words.

        Raises:
            OddError: not all was compared, and nothing that was is wrong.
        """
        saved = self.saved
        if self.error is not None:
            raise CheckError(
                f"{saved.source} cannot be read: {type(self.error).__name__}: {self.error}"
            ) from self.error
        self._compare_computed()
        missing, unexpected = self._missing(), sorted(saved.names - set(self.compared))
        # A quantised tensor may be saved in several parts, whose names begin with its own.
        unexpected = [name for name in unexpected if not name.startswith(tuple(self.skipped))]
        kinds = {"missing": missing, "unexpected": unexpected, "empty": self.empty, "different": self.different}
        problems = [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]
        if problems and not self.empty and not self.different and self._may_be_renamed(saved, missing, unexpected):
            raise OddError(
                f"{saved.source} holds as many elements as the live model, but Transformers stores this model under "
                f"other names than it has live, and its conversion does not lead to them: {len(self.compared)} tensors "
                f"were compared. Not compared: live {listed(missing)}, saved {listed(unexpected)}",
                _summary([self]),
            )
        if problems and not self.empty and self.expected.doubt:
            raise OddError(
                f"{saved.source} could be compared in {len(self.compared)} tensors alone, since {self.expected.doubt}. "
                f"By their names {'; '.join(problems)}",
                _summary([self]),
            )
        return problems

    def _compare_computed(self) -> None:
        """Compare what PEFT makes of live tensors, which rounding may make in another way."""
        for key, computed in self.expected.computed.items():
            self.live[key], self.sizes[key] = key, computed.numel()
            if key not in self.saved.names:
                self.absent.append(key)
                continue
            stored = self.saved.read(key)
            self._count(key, key, stored)
            if not _close(stored, computed.cpu()):
                self._compare(key, stored, computed)

    def _may_be_renamed(self, saved: SavedTensors, missing: list[str], unexpected: list[str]) -> bool:
        """Whether conversion did not lead to the tensors left over, and both sides have as many elements left over."""
        if not unexpected or not missing or not self.unfollowed.issuperset(missing):
            return False
        return sum(self.sizes[name] for name in missing) == sum(saved.read(name).numel() for name in unexpected)

    def _missing(self) -> list[str]:
        ignored = set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())
        there = set(self.compared.values())
        absent = [*self.absent, *(name for waiting in self.pending.values() for name in waiting)]
        return [name for name in absent if self.live[name] not in there and name not in ignored]


def _opened(folder: Path, model: Any, trained: set[str], cast: bool) -> list[_Comparison]:
    """What is to be compared: the folder, or where it holds adapters, the folder of each."""
    if not folder.is_dir():
        raise CheckError(f"expected a checkpoint in {folder}, but there is no such folder")
    adapters = list(getattr(model, "peft_config", None) or {})
    saved = open_saved(folder)
    if saved is not None and not saved.is_adapter:
        named = any(adapter in name.split(".") for adapter in adapters for name in saved.names)
        if not adapters or named:
            return [_Comparison(folder, model, trained, cast, saved)]
        return _owning(trained, [_of_adapter(folder, model, cast, saved, active_adapter(model))])
    comparisons, absent = [], []
    for adapter, path in adapter_folders(model, folder).items():
        there = open_saved(path) if path.is_dir() else None
        if there is not None:
            comparisons.append(_of_adapter(path, model, cast, there, adapter))
        elif any(adapter in name.split(".") for name in trained):
            absent.append(path)
    if absent or not comparisons:
        path = (absent or [folder])[0]
        inside = ", ".join(sorted(entry.name for entry in path.iterdir())) if path.is_dir() else ""
        raise CheckError(
            f"expected saved weights in {path}, but it contains none that can be "
            f"loaded as a whole; it holds {inside or 'nothing'}. Under FSDP set the state dict type to "
            "FULL_STATE_DICT, under ZeRO-3 stage3_gather_16bit_weights_on_model_save to true, before saving"
        )
    return _owning(trained, comparisons)


def _of_adapter(folder: Path, model: Any, cast: bool, saved: SavedTensors, adapter: str) -> _Comparison:
    return _Comparison(folder, model, set(), cast, saved, adapter, saved_adapter(model, adapter))


def _owning(trained: set[str], comparisons: list[_Comparison]) -> list[_Comparison]:
    """Give each tensor that trains to the folder that has to hold it, so that none is in no folder."""
    for name in trained:
        if any(comparison.expected.computed_from(name, str(comparison.adapter)) for comparison in comparisons):
            continue
        owners = [comparison for comparison in comparisons if name in (comparison.expected.names or {})]
        owners = owners or [comparison for comparison in comparisons if str(comparison.adapter) in name.split(".")]
        owners = owners or [
            comparison
            for comparison in comparisons
            if any(key in comparison.saved.names for key in comparison._keys(name))
        ]
        (owners or comparisons)[0].trained.add(name)
    return comparisons


def _finish(comparisons: Sequence[_Comparison]) -> None:
    odd: list[OddError] = []
    texts = []
    for comparison in comparisons:
        try:
            if problems := comparison.problems():
                texts.append(
                    f"{comparison.saved.source} does not reload as the live model, of which {len(comparison.live)} "
                    f"tensors were expected: {'; '.join(problems)}"
                )
        except OddError as error:
            odd.append(error)
    if texts:
        raise CheckError(
            "; ".join(texts) + ". Do not train on from it: save a gathered state dict (accelerator.get_state_dict of "
            "the wrapped model) and compare again"
        )
    if odd:
        raise odd[0]


def _summary(comparisons: Sequence[_Comparison]) -> dict[str, Any]:
    return {
        "source": str(comparisons[0].saved.source) if comparisons else None,
        "tensors": sum(len(comparison.compared) for comparison in comparisons),
        "bytes": sum(comparison.bytes for comparison in comparisons),
        **(
            {"skipped": skipped}
            if (skipped := [name for comparison in comparisons for name in comparison.skipped])
            else {}
        ),
    }


def _same(stored: Tensor, live: Tensor, cast: bool) -> bool:
    """Equal in shape, type and every bit."""
    live = live.to(stored.dtype) if cast else live
    return stored.shape == live.shape and stored.dtype == live.dtype and _same_bits(stored, live.cpu())


def _close(stored: Tensor, computed: Tensor) -> bool:
    """Equal but for rounding."""
    if stored.shape != computed.shape or stored.dtype != computed.dtype:
        return False
    if not computed.is_floating_point():
        return torch.equal(stored, computed)
    allowed = _UNITS * torch.finfo(computed.dtype).eps
    return torch.allclose(
        stored.float(),
        computed.float(),
        rtol=allowed,
        atol=allowed * float(torch.linalg.vector_norm(computed.float(), ord=float("inf"))),
    )


def _same_bits(stored: Tensor, live: Tensor) -> bool:
    """Equal bit for bit, so that NaN equals itself and 0 differs from -0."""
    return torch.equal(_bits(stored), _bits(live))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _part(model: nn.Module, prefix: str) -> nn.Module:
    """The module whose parameters' names begin with ``prefix``, without wrappers."""
    model = unwrapped(model)
    for name in filter(None, prefix.split(".")):
        model = unwrapped(getattr(model, name))
    return model
