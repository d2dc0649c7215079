"""Strategies: how ranks share a model, as the environment variables that ``accelerate launch`` sets for each.

Code that works under ``accelerate launch`` therefore works unchanged in a launch. Must not import the stack.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_trlcompat import stack
from pytest_trlcompat.launch import config_keys

__all__ = [
    "DEEPSPEED_CONFIG_NAME",
    "FSDP_CONFIG_NAMES",
    "NAMES",
    "STRATEGY_PREFIXES",
    "AccelerateLaunch",
    "Strategy",
    "StrategyAbsent",
    "StrategyError",
    "accelerate_config",
    "check_present",
    "from_accelerate",
    "is_file_name",
    "read_accelerate_config",
    "strategy",
]

NAMES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
DEEPSPEED_CONFIG_NAME = "deepspeed_config.json"

FSDP_CONFIG_NAMES = {"transformer_cls_to_wrap": "transformer_layer_cls_to_wrap"}
"""Settings with other names in Accelerate's configuration files than in the environment, without the prefixes."""

STRATEGY_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "TP_SIZE")
"""How the variables begin by which Accelerate's launcher tells ranks their strategy."""

# The defaults of strategies by name. A file that a user gives gets none of them: what it does must show.
_DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_allow_untested_optimizer": True,
}
# At DeepSpeed's default threshold the parameters of a tiny model are never partitioned, and a broken save looks right.
_ZERO3_DEFAULTS = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}

_FSDP_DEFAULTS: dict[str, Any] = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "offload_params": False,
    "activation_checkpointing": False,
    "cpu_ram_efficient_loading": False,
}
_FSDP1_DEFAULTS: dict[str, Any] = {
    "sharding_strategy": "FULL_SHARD",
    "state_dict_type": "FULL_STATE_DICT",
    "use_orig_params": True,
    "sync_module_states": True,
    "forward_prefetch": False,
    "backward_prefetch": "BACKWARD_PRE",
}
# The first releases of Accelerate that know FSDP2 refuse any other type of state dict.
_FSDP2_DEFAULTS: dict[str, Any] = {"reshard_after_forward": True, "state_dict_type": "SHARDED_STATE_DICT"}
_FSDP_MORE = {"min_num_params", "transformer_cls_to_wrap", "activation_checkpointing_offload", "ignored_modules"}


_NEEDS = {
    "fsdp2": (
        ("torch", ">=2.6", "torch.distributed.fsdp.fully_shard came with torch 2.6; Accelerate uses no other"),
        ("accelerate", ">=1.6", "Accelerate knows FSDP2 from 1.6 on, and takes FSDP1 before without a word"),
    )
}
"""What strategies require of the stack on every device, and why."""


class StrategyError(ValueError):
    """The name or the options of a strategy are invalid."""


class StrategyAbsent(StrategyError):
    """The installed stack does not have this strategy, on any device."""


@dataclass(frozen=True)
class AccelerateLaunch:
    """A strategy that a user's own file or options of ``accelerate launch`` say, and nothing of ours.

    Attributes:
        words: options of ``accelerate launch``, without the script.
        options: what its parser has made of them, where that is known; then ``words`` is not read.
        folder: the working directory, from which paths in them are meant.
        config_file: the absolute path of the configuration file, if there is one.
        variables: what Accelerate's launcher sets for ranks; ``None`` until a process that has the stack was asked.
    """

    words: tuple[str, ...]
    folder: str
    options: Mapping[str, Any] | None = None
    config_file: str | None = None
    variables: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Strategy:
    """One way to share a model among ranks.

    Attributes:
        name: one of :data:`NAMES`.
        config: the DeepSpeed configuration of ``zero1`` to ``zero3``, else ``None``.
        fsdp: the ``FSDP_*`` settings of ``fsdp1`` and ``fsdp2`` without their prefix, lower case, else ``None``.
        more: further environment variables for every rank.
        world_size: number of ranks in a configuration file.
        accelerate: the user's own file or options, which then decide alone; ``config`` and ``fsdp`` only describe them.
        needs_cpu: whether that asks for the CPU, which the launch's device must then be.
    """

    name: str
    config: dict[str, Any] | None = None
    fsdp: dict[str, Any] | None = field(default=None)
    more: dict[str, str] = field(default_factory=dict)
    world_size: int | None = None
    accelerate: AccelerateLaunch | None = None
    needs_cpu: bool = False

    @property
    def zero_stage(self) -> int | None:
        return None if self.config is None else int(self.config["zero_optimization"]["stage"])

    @property
    def fsdp_version(self) -> int | None:
        return None if self.fsdp is None else int(self.name[-1])

    @property
    def shards_parameters(self) -> bool:
        """Whether each rank keeps only its part of every parameter, so that a full copy would be a downgrade."""
        if self.fsdp is not None:
            return self.name == "fsdp2" or str(self.fsdp["sharding_strategy"]).upper() in ("FULL_SHARD", "1")
        return self.zero_stage == 3

    def environment(self, folder: Path) -> dict[str, str]:
        """The variables for every rank; writes the DeepSpeed configuration into ``folder`` where there is one.

        Source: ``accelerate/utils/launch.py``, ``prepare_multi_gpu_env`` and ``prepare_deepspeed_cmd_env``.

        Raises:
            RuntimeError: it is a user's own file, and Accelerate was not asked yet.
        """
        if self.accelerate is not None:
            if self.accelerate.variables is None:
                raise RuntimeError(f"{self.accelerate.words} were not read by Accelerate; a launcher does that")
            return {**self.accelerate.variables, **self.more}
        if self.config is not None:
            path = folder / DEEPSPEED_CONFIG_NAME
            path.write_text(json.dumps(self.config, indent=1))
            return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path), **self.more}
        if self.fsdp is not None:
            variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": str(self.fsdp_version)}
            variables |= {f"FSDP_{key.upper()}": _text(value) for key, value in self.fsdp.items()}
            return {**variables, **self.more}
        return dict(self.more)


def strategy(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """Make a strategy from its name and options.

    Args:
        name: one of :data:`NAMES`.
        options: for ``zero*`` DeepSpeed configuration, merged into the defaults key by key. ``config`` may be
            the path of a JSON file instead, ``{"config": "ds.json"}``, which gets no defaults; other options are merged
            into it. For ``fsdp*`` the names of Accelerate's FSDP settings in lower case and without ``FSDP_``
            (``sharding_strategy="NO_SHARD"``); for the others none.

    Raises:
        StrategyError: for an unknown name or option, or options of a strategy that has none.
    """
    chosen = dict(options or {})
    if name not in NAMES:
        hint = f"; accelerate_config({name!r}) reads a configuration file" if is_file_name(name) else ""
        raise StrategyError(f"unknown strategy {name!r}; known are {', '.join(NAMES)}{hint}")
    if name.startswith("zero"):
        return Strategy(name, config=_deepspeed_config(int(name[-1]), chosen))
    if name.startswith("fsdp"):
        return Strategy(name, fsdp=_fsdp_settings(name, chosen))
    if chosen:
        raise StrategyError(f"strategy {name!r} has no options, but got {', '.join(sorted(chosen))}")
    return Strategy(name)


def is_file_name(text: str) -> bool:
    """Whether a text is the path of a configuration file and no name of a strategy, which has no dot and no slash."""
    return text not in NAMES and bool(Path(text).suffix or os.sep in text)


def check_present(chosen: Strategy, versions: Mapping[str, str]) -> None:
    """Reject a strategy that the stack does not have, before anything is started.

    Args:
        versions: of the installed packages.

    Raises:
        StrategyAbsent: says what is missing.
    """
    for package, text, reason in _NEEDS.get(chosen.name, ()):
        if package in versions and not stack.satisfied({package: text}, versions):
            raise StrategyAbsent(
                f"strategy {chosen.name!r} was requested, but this stack has {package} {versions[package]}: {reason}. "
                f"Use {package}{text}, or another strategy ({', '.join(NAMES)})."
            )


def accelerate_config(path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> Strategy:
    """Read an Accelerate configuration file, YAML or JSON, as ``accelerate config`` writes it.

    A launch under it passes the file to Accelerate's own launcher as it is; nothing is added. What a launch does with
    each key is in ``pytest_trlcompat/launch/config_keys.py``.

    Args:
        folder: the working directory of the ranks, from which the path of a DeepSpeed configuration in it is meant; by
            default this process's.

    Raises:
        StrategyError: it cannot be read, has a key that nobody reads or no launch can honour, or requests none of
            :data:`NAMES`.
    """
    file = Path(path)
    launch = AccelerateLaunch(
        words=("--config_file", str(file.absolute())),
        folder=str(Path(folder or "").absolute()),
        config_file=str(file.absolute()),
    )
    return from_accelerate(read_accelerate_config(file), file, launch)


def from_accelerate(config: Mapping[str, Any], path: Path, launch: AccelerateLaunch) -> Strategy:
    """Make a strategy from the content of an Accelerate configuration file.

    Args:
        config: the content, and what options of ``accelerate launch`` say instead.
        path: of the file, for messages.
        launch: what Accelerate itself is asked.

    Raises:
        StrategyError: as for :func:`accelerate_config`.
    """
    problems = list(config_keys.problems_of_accelerate(config))
    if problems:
        raise StrategyError(f"{path} cannot be honoured: {'; '.join(problems)}")
    kind = str(config.get("distributed_type", "NO")).upper()
    kind = "NO" if kind == "FALSE" else kind  # what YAML makes of NO without quotes; Accelerate goes on as with NO
    size = int(config["num_processes"]) if config.get("num_processes") is not None else None
    if kind == "DEEPSPEED":
        described = _from_deepspeed_section(dict(config.get("deepspeed_config") or {}), path, Path(launch.folder))
    elif kind == "FSDP":
        described = _from_fsdp_section(dict(config.get("fsdp_config") or {}))
    elif kind in ("NO", "MULTI_GPU", "MULTI_NPU", "MULTI_CPU", "MULTI_XPU"):
        described = Strategy("single" if kind == "NO" else "ddp")
    else:
        raise StrategyError(f"{path}: distributed_type {kind} cannot be launched (known: {', '.join(NAMES)})")
    return replace(
        described,
        world_size=None if described.name == "single" else size,
        accelerate=launch,
        needs_cpu=kind == "MULTI_CPU" or _is_true(config.get("use_cpu", False)),
    )


def read_accelerate_config(path: Path) -> dict[str, Any]:
    """The content of an Accelerate configuration file.

    Raises:
        StrategyError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            config = json.loads(text)
        else:
            import yaml  # Accelerate requires it

            config = yaml.safe_load(text)
    except Exception as error:
        raise StrategyError(f"the Accelerate configuration {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise StrategyError(f"the Accelerate configuration {path} must be a mapping, like `accelerate config` writes")
    return config


def _from_deepspeed_section(section: dict[str, Any], path: Path, folder: Path) -> Strategy:
    file = section.get("deepspeed_config_file")
    stage = section.get("zero_stage", 2)  # as of Accelerate's plugin
    if file is None:
        config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    else:
        config = _read_config(_found_from(folder, Path(file), path))
        in_file = (config.get("zero_optimization") or {}).get("stage")
        stage = stage if in_file == "auto" else in_file
    if str(stage) not in ("1", "2", "3"):
        raise StrategyError(f"{path}: ZeRO stage {stage!r} cannot be launched (known: 1, 2, 3)")
    config = {**config, "zero_optimization": {**config["zero_optimization"], "stage": int(stage)}}
    return Strategy(f"zero{stage}", config=config)


def _found_from(folder: Path, file: Path, named_in: Path) -> Path:
    """Where Accelerate looks for a DeepSpeed configuration: from the working directory, not from beside its own file.

    Raises:
        StrategyError: it is not there.
    """
    found = folder / file
    if not found.exists():
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
    return found


def _from_fsdp_section(section: dict[str, Any]) -> Strategy:
    settings = {config_keys.section_key("fsdp_config", name): value for name, value in section.items()}
    version = str(settings.pop("fsdp_version", 1))
    if version not in ("1", "2"):
        raise StrategyError(f"fsdp_version {version} cannot be launched (known: 1, 2)")
    described = {name.removeprefix("fsdp_"): value for name, value in settings.items()}
    # Accelerate's own default; FSDP2 has no such setting.
    return Strategy(f"fsdp{version}", fsdp={"sharding_strategy": "FULL_SHARD", **described})


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "1")


def _deepspeed_config(stage: int, options: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(_DEEPSPEED_DEFAULTS)
    config["zero_optimization"] = {"stage": stage, **(_ZERO3_DEFAULTS if stage == 3 else {})}
    source = options.pop("config", None)
    if isinstance(source, Mapping):
        config = _merge(config, source)
    elif source is not None:
        config = _read_config(source)  # a file gets none of the defaults
    config = _merge(config, options)
    zero = config.get("zero_optimization")
    found = zero.get("stage") if isinstance(zero, dict) else None
    problems = list(config_keys.problems_of_deepspeed(config))
    if problems:
        raise StrategyError(f"options of strategy 'zero{stage}' cannot be honoured: {'; '.join(problems)}")
    if found != stage:
        raise StrategyError(f"strategy 'zero{stage}' got a DeepSpeed configuration of ZeRO stage {found!r}")
    return config


def _read_config(source: Any) -> dict[str, Any]:
    try:
        config = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError) as error:
        raise StrategyError(f"the DeepSpeed configuration {str(source)!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise StrategyError(f"the DeepSpeed configuration {str(source)!r} must be a JSON object")
    problems = list(config_keys.problems_of_deepspeed(config))
    if problems:
        raise StrategyError(f"the DeepSpeed configuration {str(source)!r} cannot be honoured: {'; '.join(problems)}")
    return config


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else copy.deepcopy(value)
    return merged


def _fsdp_settings(name: str, options: dict[str, Any]) -> dict[str, Any]:
    own = _FSDP1_DEFAULTS if name == "fsdp1" else _FSDP2_DEFAULTS
    known = frozenset(_FSDP_DEFAULTS) | frozenset(own) | _FSDP_MORE
    unknown = sorted(set(options) - known)
    if unknown:
        raise StrategyError(f"unknown option of {name}: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return {**_FSDP_DEFAULTS, **own, **options}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
