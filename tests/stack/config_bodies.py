"""What runs in ranks for ``test_configs.py``: the names that releases know, and what an engine was built with."""

from __future__ import annotations

from typing import Any

__all__ = ["deepspeed_names", "engine_settings", "environment", "launcher_names", "plugin_names"]


def launcher_names() -> dict[str, list[str]]:
    """The options of the launchers, and the keys of Accelerate's configuration files."""
    import argparse
    import dataclasses

    import deepspeed.launcher.runner
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    def options(parser: argparse.ArgumentParser) -> list[str]:
        return [action.dest for action in parser._actions if action.option_strings and action.dest != "help"]

    parsed = vars(deepspeed.launcher.runner.parse_args(["script.py"]))
    return {
        "accelerate": options(launch_command_parser()),
        "torchrun": options(get_args_parser()),
        "deepspeed": [name for name in parsed if name not in ("user_script", "user_args")],
        "file": [field.name for field in dataclasses.fields(ClusterConfig)],
        "SageMaker": [field.name for field in dataclasses.fields(SageMakerConfig)],
    }


def plugin_names() -> dict[str, list[str]]:
    """The variables, without their prefix, by which the plugins of Accelerate in ranks learn what a file says."""
    import inspect
    import re

    from accelerate.utils import dataclasses

    def read(plugin: type, pattern: str) -> list[str]:
        return sorted({name.lower() for name in re.findall(pattern, inspect.getsource(plugin))})

    names = {
        "deepspeed_config": read(dataclasses.DeepSpeedPlugin, r'"ACCELERATE_DEEPSPEED_([A-Z0-9_]+)"'),
        "fsdp_config": read(dataclasses.FullyShardedDataParallelPlugin, r'env_prefix \+ "([A-Z0-9_]+)"'),
        "dynamo_config": read(dataclasses.TorchDynamoPlugin, r'prefix \+ "([A-Z0-9_]+)"'),
    }
    try:
        from accelerate.parallelism_config import ParallelismConfig
    except ImportError:  # until 1.9
        return names
    return {**names, "parallelism_config": read(ParallelismConfig, r'PARALLELISM_CONFIG_([A-Z0-9_]+)"')}


def deepspeed_names() -> dict[str, list[str]]:
    """The keys for which DeepSpeed looks in a configuration, and the fields of its sections that are models."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    looked_for: set[str] = set()

    class Recording(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            looked_for.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            looked_for.add(str(key))
            return super().__contains__(key)

        def __getitem__(self, key: str) -> Any:
            looked_for.add(key)
            return super().__getitem__(key)

        def keys(self) -> Any:  # DeepSpeed asks `in config.keys()`
            return self

        def __copy__(self) -> Recording:
            return Recording(self)

    DeepSpeedConfig(Recording(train_batch_size=1))
    models: dict[str, Any] = {"zero_optimization": DeepSpeedZeroConfig}
    try:
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    except ImportError:  # until 0.17 they were read as dictionaries
        pass
    else:
        models |= {"fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}
    fields = {
        section: [name for field, info in model.model_fields.items() for name in {field, info.alias or field}]
        for section, model in models.items()
    }
    return {"": sorted(looked_for), **fields}


def environment() -> dict[str, str]:
    """The variables of a rank that say a strategy."""
    import os

    from accelerate import PartialState

    PartialState()
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    return {key: value for key, value in os.environ.items() if key.startswith(prefixes) and "USE_CPU" not in key}


def engine_settings(argument: str | None = None) -> dict[str, Any]:
    """What DeepSpeed's engine was built with.

    Args:
        argument: the path of a configuration that a program passes by itself, as ``--deepspeed`` does.
    """
    import torch
    from accelerate import Accelerator
    from trl import SFTConfig

    model: Any = torch.nn.Linear(8, 8)
    plugin = None
    if argument is not None:
        plugin = SFTConfig("out", deepspeed=argument, report_to="none", bf16=False).deepspeed_plugin
    accelerator = Accelerator(deepspeed_plugin=plugin)
    engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return {key: str(value) for key, value in engine._config._param_dict.items()}
