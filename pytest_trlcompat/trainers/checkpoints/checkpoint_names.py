"""Cure of ``transformers-resumed-names``: weights that a checkpoint has under other names than the model.

Transformers saves some models, mixtures of experts and vision models among them, under the names that their files have
on the Hub. Only ``from_pretrained`` translates these: ``Trainer`` reads the files by itself, where a training is
resumed and where the best model is loaded at its end, and takes names that are missing for no error. Those weights stay
what they were. The cure loads the checkpoint by ``from_pretrained``, and copies what that gives.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, ClassVar
from zipfile import is_zipfile

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import DEEPSPEED, FSDP, Condition, trains_adapters, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError

__all__ = ["CheckpointNamesMixin", "load_weights", "saved_names"]

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_INDEX = ".index.json"


def saved_names(folder: Path | str) -> frozenset[str]:
    """The names under which a folder has weights of a whole model. Empty where it has none.

    Reads no weights, but where they are in a file that torch wrote before it wrote zip files.

    Args:
        folder: a checkpoint of ``Trainer``, or any that ``from_pretrained`` takes.
    """
    for name in (_SAFE, _PICKLED):
        file, index = Path(folder, name), Path(folder, name + _INDEX)
        if file.is_file():
            return _names_in(file)
        if index.is_file():
            return frozenset(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    return frozenset()


def _names_in(file: Path) -> frozenset[str]:
    if file.name == _PICKLED:
        import torch

        # torch can map a file into memory only if it is a zip file, and refuses others.
        return frozenset(torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file)))
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return frozenset(opened.keys())


def load_weights(model: Any, folder: Path | str) -> int:
    """Give a model every weight of a checkpoint whose names are not the model's.

    Args:
        model: a ``PreTrainedModel``, whole on this rank. Its weights are changed in place; they keep dtype and device.
        folder: a checkpoint of ``Trainer``. For a while there is another model of the same size, on the CPU.

    Returns:
        How many names of the checkpoint are not the model's; with 0 nothing was changed.

    Raises:
        CureError: the checkpoint lacks weights of the model under any name, or has them in another shape.
    """
    foreign = saved_names(folder) - set(model.state_dict())
    if not foreign:
        return 0
    # Other shapes are only reported, so that the error below can name the weight.
    loaded, report = type(model).from_pretrained(
        folder, config=copy.deepcopy(model.config), output_loading_info=True, ignore_mismatched_sizes=True
    )
    lacking = sorted({*report["missing_keys"], *(mismatch[0] for mismatch in report["mismatched_keys"])})
    if lacking:
        others = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        raise CureError(
            CheckpointNamesMixin.__name__,
            expected=f"all weights of {type(model).__name__} in {folder}",
            seen=f"{lacking[0]}{others} is not there, or has another shape",
            packages=("transformers",),
            remedy="Resume from a checkpoint of this model, or load the model from it by from_pretrained",
        )
    model.load_state_dict(loaded.state_dict())
    return len(foreign)


def _is_of_transformers(model: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


_CONDITIONS = (
    Condition("without DeepSpeed", "DeepSpeed loads files of its own", lambda trainer: not DEEPSPEED.holds(trainer)),
    Condition("without FSDP", "FSDP loads files of its own", lambda trainer: not FSDP.holds(trainer)),
    Condition("without an adapter", "PEFT loads adapters", lambda trainer: not trains_adapters(trainer.model)),
    Condition(
        "with a model of Transformers",
        "the model is none of Transformers",
        lambda trainer: _is_of_transformers(trainer.model),
    ),
)


class CheckpointNamesMixin(Cure):
    """Lets any ``transformers.Trainer`` resume from, and end with, all weights that a checkpoint has.

    It reads the checkpoint's names, and changes nothing where they are the model's. DeepSpeed, FSDP and PEFT have files
    of their own. For a while it needs the memory of a second model on the CPU.
    """

    _kinds: ClassVar = {
        "trainer": ("ResumedEpochsMixin", "neither calls the other; cures of one topic stand together"),
        "grpo": ("ResumedEpochsMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.LOAD, patch_points.trainer_method("_load_best_model"))
    model: Any
    state: Any
    _renamed: int | None = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        result = upstream._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        self._load_renamed(resume_from_checkpoint)
        return result

    def _load_best_model(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        result = upstream._load_best_model(*args, **kwargs)
        self._load_renamed(self.state.best_model_checkpoint)
        return result

    def _load_renamed(self, folder: str) -> None:
        if all(condition.holds(self) for condition in _CONDITIONS):
            self._renamed = load_weights(self.model, folder)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        answer = under(trainer, "what is loaded from a checkpoint may have other names", *_CONDITIONS)
        if trainer is None or not answer.active:
            return answer
        if trainer._renamed is None:
            return Activity(None, "where a checkpoint is loaded")
        if not trainer._renamed:
            return Activity(False, "the checkpoint has the model's names")
        return Activity(True, f"{trainer._renamed} names of the checkpoint are not the model's")
