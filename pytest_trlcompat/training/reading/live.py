"""What live objects say: a trainer as it is built, a config, a model, an adapter's config.

Attributes are read, nothing is called but the ``to_dict`` of configs, and nothing is imported: an object's module is
there already. Imports the standard library alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pytest_trlcompat.training.aliases import names_of
from pytest_trlcompat.training.axes import CALLBACKS, trainer_of_class
from pytest_trlcompat.training.errors import TrainingError
from pytest_trlcompat.training.facts import adapter_facts, deepspeed_facts, fsdp_facts, model_facts

__all__ = ["read_objects", "read_trainer"]

Values = dict[str, Any]


def read_trainer(trainer: Any) -> tuple[str, Values, tuple[str, ...]]:
    """The name, the values and the notes of the training of a trainer.

    Raises:
        TrainingError: for what has no ``args``, ``model`` and ``accelerator``.
    """
    missing = [name for name in ("args", "model", "accelerator") if not hasattr(trainer, name)]
    if missing:
        raise TrainingError(
            f"a trainer of Transformers' or TRL's was expected, a {type(trainer).__name__} without "
            f"{', '.join(missing)} was found; give the trainer itself, when it is built"
        )
    names = tuple(cls.__name__ for cls in type(trainer).__mro__)
    values, notes = read_objects(trainer.args, trainer.model, None)
    values |= _parallel(trainer)
    handler = getattr(trainer, "callback_handler", None)
    callbacks = [type(callback).__name__ for callback in getattr(handler, "callbacks", ())]
    values["life.callbacks"] = sorted(callbacks)
    if own := sorted(name for name in callbacks if name not in CALLBACKS and not name.startswith("_")):
        notes = (*notes, f"callbacks whose effect is not known here: {', '.join(own)}")
    data = getattr(trainer, "train_dataset", None)
    columns = getattr(data, "column_names", None)
    if isinstance(columns, list):
        values["data.columns"] = [str(column) for column in columns]
    if data is not None:
        # An IterableDataset has no length.
        values["data.streamed"] = not hasattr(data, "__len__")
    return trainer_of_class(names), values, notes


def read_objects(config: object, model: object, peft_config: object) -> tuple[Values, tuple[str, ...]]:
    """The values and notes of what a trainer would be given.

    Raises:
        TrainingError: a config that is no dataclass.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TrainingError(
            f"a config such as SFTConfig(...) was expected, a {type(config).__name__} was found; give the object"
        )
    names = [field.name for field in dataclasses.fields(config)]
    values: Values = {f"arguments.{names_of(name)[0]}": _plain(getattr(config, name, None)) for name in names}
    if isinstance(model, str):
        values |= {"model.name": model, "model.given": "name"}
    elif model is not None:
        values |= _model(model)
    if peft_config is not None:
        values |= {**_adapter(peft_config), "adapter.made_by": "trainer"}
    return values, ()


def _plain(value: Any) -> Any:
    """As JSON has it; what it has not, as text."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return f"a {type(value).__name__}"


def _dict_of(config: object) -> Mapping[str, Any]:
    plain = _plain(config.to_dict()) if hasattr(config, "to_dict") else _plain(dict(vars(config)))
    return plain if isinstance(plain, dict) else {}


def _model(model: object) -> Values:
    config = getattr(model, "config", model)
    values = model_facts(_dict_of(config)) if hasattr(config, "to_dict") else {}
    dtype = getattr(model, "dtype", None)
    if dtype is not None:
        values["model.dtype"] = str(dtype).rpartition(".")[2]
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, Mapping) and adapters:
        values |= _adapter(next(iter(adapters.values())))
    # A config in a model's place does not say whether there is an adapter.
    elif hasattr(model, "named_parameters"):
        values["adapter.type"] = None
    return values


def _adapter(config: object) -> Values:
    return adapter_facts(_dict_of(config))


def _parallel(trainer: Any) -> Values:
    """How its accelerator says that ranks share the work."""
    state = getattr(trainer.accelerator, "state", None)
    kind = str(getattr(state, "distributed_type", "NO")).rpartition(".")[2].upper()
    processes = getattr(trainer.accelerator, "num_processes", None)
    values: Values = {"parallel.processes": processes} if isinstance(processes, int) else {}
    plugin = getattr(state, "deepspeed_plugin", None)
    config = getattr(getattr(plugin, "hf_ds_config", None), "config", None) or getattr(plugin, "deepspeed_config", None)
    if kind == "DEEPSPEED" and isinstance(config, Mapping):
        return values | deepspeed_facts(_plain(config), "the trainer")
    if kind == "FSDP":
        fsdp = getattr(state, "fsdp_plugin", None)
        options = {
            "version": getattr(fsdp, "fsdp_version", 1),
            "sharding_strategy": str(getattr(fsdp, "sharding_strategy", "") or ""),
            "state_dict_type": str(getattr(fsdp, "state_dict_type", "") or ""),
            "activation_checkpointing": bool(getattr(fsdp, "activation_checkpointing", False)),
            "offload_params": bool(getattr(getattr(fsdp, "cpu_offload", False), "offload_params", False)),
        }
        return values | fsdp_facts(options, "the trainer")
    return values | {"parallel.strategy": "ddp" if isinstance(processes, int) and processes > 1 else "single"}
