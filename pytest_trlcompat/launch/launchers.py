"""What the words after ``accelerate launch``, ``torchrun`` or ``deepspeed`` ask for, by these programs' own parsers.

:func:`read` needs the stack and runs in a rank; the rest runs in the test process, and in ranks for what a command
starts itself.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_trlcompat.launch import strategy as strategies
from pytest_trlcompat.launch.program import CommandError, LauncherWords
from pytest_trlcompat.launch.strategy import Strategy

__all__ = ["NAMES", "Read", "read", "read_parsed", "strategy_of", "world_size_of"]

_PARSERS: Mapping[str, tuple[str, str]] = {
    "accelerate": ("accelerate.commands.launch", "launch_command_parser"),
    "torchrun": ("torch.distributed.run", "get_args_parser"),
    "deepspeed": ("deepspeed.launcher.runner", "parse_args"),
}
NAMES = {"accelerate": "accelerate launch", "torchrun": "torchrun", "deepspeed": "deepspeed"}
"""The launchers, and how people call them."""
_SIZES = {"accelerate": "num_processes", "torchrun": "nproc_per_node", "deepspeed": "num_gpus"}
_SCRIPTS = {"accelerate": "training_script", "torchrun": "training_script", "deepspeed": "user_script"}
_ARGUMENTS = {"accelerate": "training_script_args", "torchrun": "training_script_args", "deepspeed": "user_args"}

_DEEPSPEED_SECTION = (
    *("zero_stage", "deepspeed_config_file", "offload_optimizer_device", "offload_param_device"),
    *("gradient_accumulation_steps", "gradient_clipping", "zero3_save_16bit_model", "zero3_init_flag"),
)
_ABOUT_STRATEGY = ("config_file", "use_deepspeed", "use_fsdp", "multi_gpu", "mixed_precision", *_DEEPSPEED_SECTION)
_WITHOUT_EFFECT = {
    "accelerate": (
        *("main_process_ip", "main_process_port", "same_network", "quiet", "rdzv_backend", "rdzv_conf", "tee"),
        *("log_dir", "role", "max_restarts", "monitor_interval", "num_cpu_threads_per_process", "debug"),
    ),
    "torchrun": (
        *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone", "max_restarts", "monitor_interval"),
        *("role", "log_dir", "redirects", "tee", "master_addr", "master_port", "local_addr", "start_method"),
    ),
    "deepspeed": ("master_port", "master_addr", "hostfile", "no_local_rank", "log_level", "quiet", "no_ssh_check"),
}
"""Options about how ranks meet, start and log, which the launch does by itself in their place."""
_ONE_MACHINE: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "accelerate": {"num_machines": (1,), "machine_rank": (0,), "dynamo_backend": ("no",)},
    "torchrun": {"nnodes": ("1", "1:1"), "node_rank": (0,)},
    "deepspeed": {"num_nodes": (1,), "node_rank": (0,)},
}
"""Options that may only say what holds anyway."""


@dataclass(frozen=True)
class Read:
    """The words of a launcher.

    Attributes:
        launcher: ``accelerate``, ``torchrun`` or ``deepspeed``.
        target: the script or the module, and what follows it.
        given: the options that are not as they are without being given.
        defaults: of FSDP's options, which Accelerate passes on as well.
        size: the number of ranks; ``None`` where the words leave it to the devices that there are.
        gets_local_rank: whether the launcher passes ``--local_rank``.
    """

    launcher: str
    target: tuple[str, ...]
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    size: int | None
    gets_local_rank: bool = False


def read(words: LauncherWords) -> Read:
    """Parse the words as the launcher would.

    Raises:
        CommandError: the launcher's own parser refuses them, or they ask for what cannot be honoured here.
        ImportError: the launcher is not installed.
    """
    return read_parsed(words.launcher, _parsed(words.launcher, words.words))


def read_parsed(launcher: str, options: Mapping[str, Any]) -> Read:
    """The same, of what the launcher's parser has made of them.

    Raises:
        CommandError: they ask for what cannot be honoured here.
    """
    parsed, plain = dict(options), _parsed(launcher, ("script",))
    script, arguments = parsed.pop(_SCRIPTS[launcher]), parsed.pop(_ARGUMENTS[launcher])
    target = (*(("-m",) if parsed.pop("module") else ()), str(script), *arguments)
    parsed.pop("nondefault", None)  # Accelerate's parser names there which options were given
    given = {key: value for key, value in parsed.items() if value != plain.get(key)}
    _check(launcher, given)
    return Read(
        launcher=launcher,
        target=target,
        given={key: value for key, value in given.items() if _is_about_strategy(key)},
        defaults={key: value for key, value in plain.items() if key.startswith("fsdp_")},
        size=_size(launcher, parsed.get(_SIZES[launcher])),
        gets_local_rank=launcher == "deepspeed" and not parsed.get("no_local_rank"),
    )


def _parsed(launcher: str, words: Sequence[str]) -> dict[str, Any]:
    module, name = _PARSERS[launcher]
    made: Any = getattr(importlib.import_module(module), name)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            # DeepSpeed has a function that parses, and no parser.
            return dict(vars(made(list(words)) if launcher == "deepspeed" else made().parse_args(list(words))))
    except SystemExit:
        said = (printed.getvalue().strip().splitlines() or ["no reason"])[-1]
        raise CommandError(f"{NAMES[launcher]} refuses {shlex.join(words)}: {said}") from None


def _size(launcher: str, value: Any) -> int | None:
    if value in (None, -1, "gpu", "auto", "cpu"):
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise CommandError(f"{NAMES[launcher]}: {value!r} is no number of ranks") from None


def _is_about_strategy(key: str) -> bool:
    return key in _ABOUT_STRATEGY or key.startswith("fsdp_")


def _check(launcher: str, given: Mapping[str, Any]) -> None:
    only = _ONE_MACHINE[launcher]
    for key, value in given.items():
        if key in only and value not in only[key]:
            raise CommandError(
                f"{NAMES[launcher]} --{key} {value}: a launch runs on this machine, as it is; leave {key} out"
            )
        known = (*_WITHOUT_EFFECT[launcher], *only, _SIZES[launcher])
        if key not in known and not (launcher == "accelerate" and _is_about_strategy(key)):
            raise CommandError(
                f"{NAMES[launcher]} --{key} cannot be honoured: the ranks are the launch's own. Leave it out, or "
                "say it by strategy=, options=, device= or env= of the launch"
            )


def world_size_of(found: Read, requested: int | None) -> int | None:
    """The number of ranks, by the words and by the caller.

    Raises:
        CommandError: they contradict each other.
    """
    if None not in (found.size, requested) and found.size != requested:
        raise CommandError(
            f"world_size={requested} was requested, and {NAMES[found.launcher]} is asked for {found.size} ranks; say "
            "it once"
        )
    return found.size if requested is None else requested


def strategy_of(found: Read, folder: Path) -> Strategy | None:
    """The strategy that the words ask for; ``None`` where they leave it open.

    Args:
        folder: the working directory, from which the configuration file's path is meant.

    Raises:
        StrategyError: they ask for one that cannot be launched.
    """
    given = dict(found.given)
    file = given.pop("config_file", None)
    if file is None and not given:
        return None
    path = folder / (file or "accelerate launch")
    config = strategies.read_accelerate_config(path) if file is not None else {}
    for flag, kind in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP"), ("multi_gpu", "MULTI_GPU")):
        if given.pop(flag, False):
            config["distributed_type"] = kind
    if "mixed_precision" in given:
        config["mixed_precision"] = given.pop("mixed_precision")
    kind = str(config.setdefault("distributed_type", "MULTI_GPU")).upper()
    deepspeed = {key: value for key, value in given.items() if key in _DEEPSPEED_SECTION}
    fsdp = {key: value for key, value in given.items() if key.startswith("fsdp_")}
    for section, asked, wanted in (("deepspeed_config", deepspeed, "DEEPSPEED"), ("fsdp_config", fsdp, "FSDP")):
        if asked and kind != wanted:
            flag = "use_deepspeed" if wanted == "DEEPSPEED" else "use_fsdp"
            raise CommandError(f"accelerate launch --{min(asked)} has no effect without --{flag}; add it")
        if kind == wanted:
            config[section] = {**dict(config.get(section) or {}), **asked}
    if kind == "FSDP":
        config["fsdp_config"] = _with_defaults(config["fsdp_config"], found.defaults)
    return strategies.from_accelerate(config, path)


def _with_defaults(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Accelerate passes on its own defaults, which are others than those of a strategy by name."""
    version = int(section.get("fsdp_version") or defaults.get("fsdp_version") or 1)
    known = {f"fsdp_{strategies.FSDP_CONFIG_NAMES.get(name, name)}" for name in strategies.fsdp_options(version)}
    passed = {key: value for key, value in defaults.items() if key in known and value is not None}
    return {"fsdp_version": version, "fsdp_auto_wrap_policy": "NO_WRAP", **passed, **section}
