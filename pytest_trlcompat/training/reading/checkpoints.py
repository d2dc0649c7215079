"""What the JSON files of a checkpoint say: the model's and the adapter's configs, and the state of its trainer.

``training_args.bin`` is a pickle and is never opened: to unpickle is to run what somebody wrote. Imports the standard
library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_trlcompat.training.errors import TrainingError
from pytest_trlcompat.training.facts import adapter_facts, model_facts
from pytest_trlcompat.training.reading.files import read_mapping
from pytest_trlcompat.training.training import Training, joined

__all__ = ["of_folder"]

_PICKLED = "training_args.bin"


def of_folder(folder: Path, *, of_model: bool = False) -> Training:
    """The training that wrote a checkpoint, as far as its JSON files say.

    Args:
        of_model: whether it is only what a training starts from, which says nothing of that training's life.

    Raises:
        TrainingError: a folder without any of these files, or one of them is no JSON.
    """
    readers = {"config.json": model_facts, "adapter_config.json": adapter_facts}
    parts = [
        Training(values=facts(read_mapping(folder / name)), source=str(folder / name))
        for name, facts in readers.items()
        if (folder / name).is_file()
    ]
    state = folder / "trainer_state.json"
    if state.is_file() and not of_model:
        parts.append(_of_state(read_mapping(state), str(state)))
    if not parts:
        raise TrainingError(
            f"{folder}: config.json, adapter_config.json or trainer_state.json of a checkpoint was expected, none of "
            "them is there; give the folder of a checkpoint"
        )
    notes: tuple[str, ...] = ()
    if (folder / _PICKLED).is_file() and not of_model:
        notes = (f"{folder / _PICKLED} is a pickle and was not read: give the arguments as a file or a command",)
    return joined([*parts, Training(source=str(folder), notes=notes)])


def _of_state(state: Mapping[str, Any], source: str) -> Training:
    stateful = state.get("stateful_callbacks")
    names = sorted(stateful) if isinstance(stateful, Mapping) else []
    values: dict[str, Any] = {"life.saved": True}
    arguments = {"per_device_train_batch_size": "train_batch_size", "logging_steps": "logging_steps"}
    values |= {
        f"arguments.{name}": state[key] for name, key in arguments.items() if isinstance(state.get(key), (int, float))
    }
    if names:
        values["life.callbacks"] = names
    return Training(values=values, source=source)
