"""DeepSpeed's ZeRO, one strategy for each stage."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_trlcompat.strategies.family import Family, Settings, StrategyError

__all__ = ["DeepSpeed"]

_CONFIG_NAME = "deepspeed_config.json"

# The defaults of strategies by name. A file that a user gives gets none of them: what it does must show.
_DEFAULTS: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_allow_untested_optimizer": True,
}
# At DeepSpeed's default threshold the parameters of a tiny model are never partitioned, and a broken save looks right.
_ZERO3_DEFAULTS = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}

_NOT_TRAINED_BY = ("NoneType", "DummyOptim", "DeepSpeedZeRoOffload")
"""Classes of an engine's optimizer where it has none."""


class DeepSpeed(Family):
    """ZeRO: stage 1 shards the optimizer's state, 2 gradients too, 3 parameters too. Settings are DeepSpeed's own."""

    names = ("zero1", "zero2", "zero3")
    # DeepSpeed has one optimizer for stages 1 and 2.
    alike = ("zero1",)
    position = 30
    packages = ("deepspeed",)
    kind = "deepspeed"
    engine = ("deepspeed.runtime.engine", "DeepSpeedEngine")
    is_loaded_on_request = True
    accelerate_type = "DEEPSPEED"
    section = "deepspeed_config"
    flag = "use_deepspeed"

    def settings(self, name: str, options: Mapping[str, Any]) -> Settings:
        from pytest_trlcompat.strategies.config_keys import problems_of_deepspeed

        stage, chosen = int(name[-1]), dict(options)
        config = copy.deepcopy(_DEFAULTS)
        config["zero_optimization"] = {"stage": stage, **(_ZERO3_DEFAULTS if stage == 3 else {})}
        source = chosen.pop("config", None)
        if isinstance(source, Mapping):
            config = _merge(config, source)
        elif source is not None:
            config = _read_config(source)  # a file gets none of the defaults
        config = _merge(config, chosen)
        if problems := list(problems_of_deepspeed(config)):
            raise StrategyError(f"options of strategy {name!r} cannot be honoured: {'; '.join(problems)}")
        zero = config.get("zero_optimization")
        configured = zero.get("stage") if isinstance(zero, dict) else None
        if configured != stage:
            raise StrategyError(f"strategy {name!r} got a DeepSpeed configuration of ZeRO stage {configured!r}")
        return config

    def variables(self, name: str, settings: Settings | None, folder: Path) -> dict[str, str]:
        path = folder / _CONFIG_NAME
        path.write_text(json.dumps(settings, indent=1))
        return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}

    def launcher_section(self, name: str, settings: Settings | None, folder: Path) -> dict[str, Any]:
        # Accelerate rejects settings that are also in DeepSpeed's configuration, such as mixed precision.
        return {"deepspeed_config_file": str(folder / _CONFIG_NAME)}

    def read_section(self, section: Mapping[str, Any], path: Path, folder: Path) -> tuple[str, Settings]:
        file = section.get("deepspeed_config_file")
        stage = section.get("zero_stage", 2)  # as of Accelerate's plugin
        if file is None:
            config: Settings = {"zero_optimization": {"stage": stage}}
        else:
            config = _read_config(_resolve(folder, Path(file), path))
            in_file = (config.get("zero_optimization") or {}).get("stage")
            stage = stage if in_file == "auto" else in_file
        if f"zero{stage}" not in self.names:
            stages = ", ".join(name[-1] for name in self.names)
            raise StrategyError(f"{path}: ZeRO stage {stage!r} cannot be launched (known: {stages})")
        return f"zero{stage}", {**config, "zero_optimization": {**config["zero_optimization"], "stage": int(stage)}}

    def describe(self, name: str, settings: Settings | None) -> str:
        return "DeepSpeed"

    def describe_variables(self, variables: Mapping[str, str]) -> str | None:
        return "DeepSpeed" if "ACCELERATE_USE_DEEPSPEED" in variables else None

    def shards_parameters(self, name: str, settings: Settings | None) -> bool:
        return name == "zero3"

    def required(self, name: str, settings: Settings | None, world_size: int) -> dict[str, Any]:
        return {"zero_stage": int(name[-1])}

    def measure(self, engine: Any, entry: dict[str, Any]) -> None:
        entry["zero_stage"] = max(entry.get("zero_stage", 0), engine.zero_optimization_stage())
        for parameter in engine.module.parameters():
            # ZeRO-3 leaves an empty parameter, which knows its whole size and this rank's part.
            whole = getattr(parameter, "ds_numel", None)
            entry["local"] += parameter.numel() if whole is None else parameter.ds_tensor.numel()
            entry["total"] += parameter.numel() if whole is None else whole
        entry["device_type"] = engine.device.type

    def differences(self, required: Mapping[str, Any], engine: Mapping[str, Any]) -> Iterator[str]:
        stage = required["zero_stage"]
        if engine["zero_stage"] != _stage_due(stage, engine):
            yield f"differs: ZeRO stage {stage} was requested, {engine['zero_stage']} was found"

    def is_trainable(self, engine: Any) -> bool:
        optimizer = type(getattr(engine, "optimizer", None)).__name__
        return optimizer not in _NOT_TRAINED_BY and super().is_trainable(engine)


def _stage_due(requested: int, engine: Mapping[str, Any]) -> int:
    """ZeRO 1 and 2 shard what belongs to an optimizer: a model without one has nothing, and TRL gives it stage 0."""
    no_optimizer = not engine["trainable"] and requested < 3
    return 0 if no_optimizer and engine["zero_stage"] == 0 else requested


def _resolve(folder: Path, file: Path, named_in: Path) -> Path:
    """Where Accelerate looks for a DeepSpeed configuration: from the working directory, not from beside its own file.

    Raises:
        StrategyError: it is not there.
    """
    path = folder / file
    if not path.exists():
        beside = named_in.parent / file
        hint = (
            f"there is {beside.absolute()}; start in its folder (cwd=), or write its whole path"
            if beside.exists()
            else "write its whole path, or start in its folder"
        )
        raise StrategyError(
            f"{named_in}: deepspeed_config_file: {file} is not in the working directory {folder}, where Accelerate "
            f"looks for it; {hint}"
        )
    return path


def _read_config(source: Any) -> Settings:
    from pytest_trlcompat.strategies.config_keys import problems_of_deepspeed

    try:
        config = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError) as error:
        raise StrategyError(f"the DeepSpeed configuration {str(source)!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise StrategyError(f"the DeepSpeed configuration {str(source)!r} must be a JSON object")
    if problems := list(problems_of_deepspeed(config)):
        raise StrategyError(f"the DeepSpeed configuration {str(source)!r} cannot be honoured: {'; '.join(problems)}")
    return config


def _merge(base: Settings, over: Mapping[str, Any]) -> Settings:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else copy.deepcopy(value)
    return merged
