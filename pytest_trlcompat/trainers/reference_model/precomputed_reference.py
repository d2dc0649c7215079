"""Cure of ``dpo-precomputed-in-memory``, ``dpo-precomputed-fsdp2``, ``dpo-precomputed-other-model`` and
``kto-precomputed-in-memory``: what a reference model says, computed before training.

With ``precompute_ref_log_probs`` TRL keeps them in a cache file beside the dataset's own, which is named by a hash of
the reference model's weights, and which every rank reads.

- Of a dataset in memory, or with ``datasets.disable_caching()``, every process takes a file of its own for it. The
  first rank writes its own, and the others find nothing; some releases find nothing in a single process either. The
  cure gives TRL the same rows from files that all ranks see.
- Where ranks hold parts of the weights, the hash is one of these: under ZeRO-3 of none, so that the log-probabilities
  of another reference model are taken; under FSDP2 there is none. The cure hashes whole weights, one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError, leaving_out
from pytest_trlcompat.trainers.curing.patching import PatchPoint, replaced_in
from pytest_trlcompat.trainers.curing.upstream import method_uses, points_of

__all__ = ["PrecomputedReferenceMixin"]

HASH_MODULE = PatchPoint("trl.trainer.dpo_trainer:hash_module", ">=0.29")

_NAME = "PrecomputedReferenceMixin"
_COMPUTE = "_precompute_ref_logps"
_CACHE_PATH = "_get_cache_file_path"


class PrecomputedReferenceMixin(Cure):
    """Lets a trainer with ``precompute_ref_log_probs`` have those of its own reference model, on every rank.

    A dataset in memory is written to a temporary folder by the first rank, and every rank reads it from there; the
    folder is deleted with the trainer. A dataset that is read from files already is left alone. Weights of which ranks
    hold parts are gathered to be hashed, one parameter at a time.

    Raises:
        CureError: another rank does not see that folder, as on several machines without a shared file system; on every
            rank.
    """

    # GRPO computes no log-probabilities of a reference model before training.
    _kinds: ClassVar = {
        "trainer": ("FSDPCheckpointedCacheMixin", "its __init__ calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (
        HASH_MODULE,
        PatchPoint("trl.trainer.dpo_trainer:DPOTrainer._precompute_ref_logps", ">=0.29"),
        PatchPoint("trl.trainer.kto_trainer:KTOTrainer._precompute_ref_logps", ">=1.8"),
    )
    accelerator: Any
    _written: int = 0
    _hashed: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with self._hashing():
            super().__init__(*args, **kwargs)

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._hashing())
            if not _takes_cache_files(type(self)) or not hasattr(dataset, _CACHE_PATH) or _is_cached_on_all(dataset):
                return upstream._precompute_ref_logps(dataset, *args, **kwargs)
            stack.enter_context(_caching())
            dataset_with_logps = upstream._precompute_ref_logps(self._from_files(dataset), *args, **kwargs)
        # Every rank opens the files before the first one may end, and delete them.
        self.accelerator.wait_for_everyone()
        return dataset_with_logps

    def _hashing(self) -> contextlib.AbstractContextManager[None]:
        return replaced_in(points_of(type(self), HASH_MODULE), self._of_whole_weights, _NAME)

    def _of_whole_weights(self, upstream: Callable[[Any], str]) -> Callable[[Any], str]:
        @functools.wraps(upstream)
        def hash_module(module: Any) -> str:
            # The parameters themselves: detached tensors have lost the attributes of ZeRO-3's.
            state = module.state_dict(keep_vars=True)
            if not any(map(_is_part, state.values())):
                return upstream(module)
            self._hashed += 1
            digest = hashlib.sha256()
            for name, tensor in sorted(state.items()):
                with _whole(tensor, self.accelerator.device) as whole:
                    digest.update(f"{name} {whole.dtype} {tuple(whole.shape)} ".encode())
                    digest.update(_bytes_of(whole))
            return digest.hexdigest()

        return hash_module

    def _from_files(self, dataset: Any) -> Any:
        """The same rows, read from files that every rank sees. Collective."""
        import datasets
        from accelerate.utils import broadcast_object_list, gather_object

        shared = ["", ""]
        if self.accelerator.is_main_process:
            shared = [tempfile.mkdtemp(prefix="trlcompat-"), dataset._fingerprint]
            weakref.finalize(self, shutil.rmtree, shared[0], ignore_errors=True)
            # `save_to_disk` writes a format as JSON, and refuses one that is made by a function.
            dataset.with_format(None).save_to_disk(shared[0])
        folder, fingerprint = broadcast_object_list(shared, from_process=0)
        unseen = [rank for rank, seen in enumerate(gather_object([Path(folder).is_dir()])) if not seen]
        if unseen:
            raise CureError(
                _NAME,
                expected=f"the folder {folder}, in which the first rank has written the dataset, on every rank",
                seen=f"ranks {', '.join(map(str, unseen))} do not see it",
                packages=("trl", "datasets"),
                remedy="Point TMPDIR at storage that all machines share, or give a dataset that was loaded from there"
                + leaving_out(_NAME),
            )
        self._written += 1
        read, form = datasets.load_from_disk(folder), dataset.format
        columns = {"columns": form["columns"], "output_all_columns": form["output_all_columns"]}
        read = read.with_format(form["type"], **columns, **form["format_kwargs"])
        # The rows are the same, and so is the fingerprint; a format of a function would make another one on each rank.
        read._fingerprint = fingerprint
        return read

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not _takes_cache_files(trainer_class):
            return Activity(False, "TRL keeps no reference log-probabilities in cache files")
        if trainer is None:
            return Activity(None, "with precompute_ref_log_probs, for a dataset in memory, or weights in parts")
        if not getattr(trainer.args, "precompute_ref_log_probs", False):
            return Activity(False, "precompute_ref_log_probs is off")
        if trainer._written or trainer._hashed:
            done = f"{trainer._written} datasets in memory were written to files, {trainer._hashed} models hashed whole"
            return Activity(True, done)
        return Activity(None, "where a dataset is in memory, or where ranks hold parts of the weights")


def _takes_cache_files(cls: type) -> bool:
    return method_uses(cls, _COMPUTE, _CACHE_PATH)


def _is_cached_on_all(dataset: Any) -> bool:
    """Whether each rank finds the cache file of another, beside the file that both read. Collective."""
    import datasets
    from accelerate.utils import gather_object

    return all(gather_object([bool(datasets.is_caching_enabled() and dataset.cache_files)]))


@contextlib.contextmanager
def _caching() -> Iterator[None]:
    """With caching, without which cache files have random names. What is written lies in the folder that is deleted."""
    import datasets

    enabled = datasets.is_caching_enabled()
    datasets.enable_caching()
    try:
        yield
    finally:
        if not enabled:
            datasets.disable_caching()


def _is_part(tensor: Any) -> bool:
    """Whether a rank holds a part of it alone: partitioned by ZeRO-3, or a DTensor."""
    return hasattr(tensor, "ds_id") or hasattr(tensor, "full_tensor")


@contextlib.contextmanager
def _whole(tensor: Any, device: Any) -> Iterator[Any]:
    """The tensor as all ranks together hold it. Collective."""
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            yield tensor.detach()
    elif hasattr(tensor, "full_tensor"):
        yield tensor.detach().to(device).full_tensor()
    else:
        yield tensor.detach()


def _bytes_of(tensor: Any) -> bytes:
    """Of any dtype, also those that NumPy does not know."""
    import torch

    content: bytes = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return content
