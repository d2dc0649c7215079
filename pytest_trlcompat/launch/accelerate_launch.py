"""The variables that ``accelerate launch`` itself would set for ranks, from its own code.

Runs in a process that has the stack. A private copy of Accelerate's launcher is asked, which starts nothing here.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_trlcompat.launch.strategy import STRATEGY_PREFIXES
from pytest_trlcompat.strategies import StrategyError

__all__ = ["variables"]

_OF_THE_LAUNCH = (
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME", "PYTHONPATH"),
    "ACCELERATE_USE_CPU",
)
"""What Accelerate's launcher sets and a launch says itself: where ranks meet, their threads, paths and device."""


def variables(options: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The variables of every rank, without those of :data:`_OF_THE_LAUNCH`.

    Args:
        options: as the parser of ``accelerate launch`` makes them, with the script.
        folder: the working directory, from which the path of the configuration file is meant.

    Raises:
        StrategyError: Accelerate refuses the options or the file.
    """
    module = _private_copy()
    arguments = argparse.Namespace(**options)
    # A file may leave it open; no variable depends on it.
    arguments.num_processes = 2
    if arguments.config_file is not None:
        arguments.config_file = str(folder / arguments.config_file)
    elif not (arguments.use_deepspeed or arguments.use_fsdp):
        arguments.multi_gpu = True  # otherwise Accelerate counts the devices
    environments: list[dict[str, str]] = []
    _replace_launchers(module, environments)
    with _without_strategy() as before:
        try:
            module.launch_command(arguments)
        except Exception as error:
            source = arguments.config_file or "accelerate launch"
            raise StrategyError(f"Accelerate refuses {source}: {type(error).__name__}: {error}") from error
    (environment,) = environments
    changed = {key: value for key, value in environment.items() if before.get(key) != value}
    return {key: value for key, value in changed.items() if key not in _OF_THE_LAUNCH}


def _private_copy() -> ModuleType:
    # A copy, so that what a test or a launch has replaced in the public module is not met.
    spec = importlib.util.find_spec("accelerate.commands.launch")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The file of `accelerate config` in the user's cache: a test must not depend on it.
    module.default_config_file = os.devnull  # type: ignore[attr-defined]
    return module


def _replace_launchers(module: Any, environments: list[dict[str, str]]) -> None:
    def prepare_only(prepare: Callable[[Any], Any]) -> Callable[[Any], None]:
        def launch(arguments: Any) -> None:
            # Of any other port, Accelerate asks whether it is free.
            arguments.main_process_port = 0
            prepared = prepare(arguments)
            # prepare_multi_gpu_env returns the variables alone, the two others the command and the variables.
            environments.append(prepared[1] if isinstance(prepared, tuple) else prepared)

        return launch

    def refuse(name: str, *_: Any) -> None:
        raise StrategyError(f"it would be started by {name}, and a launch runs on this machine")

    module.simple_launcher = prepare_only(module.prepare_simple_launcher_cmd_env)
    module.multi_gpu_launcher = prepare_only(module.prepare_multi_gpu_env)
    module.deepspeed_launcher = prepare_only(module.prepare_deepspeed_cmd_env)
    for name in ("tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher"):
        setattr(module, name, functools.partial(refuse, name))


@contextlib.contextmanager
def _without_strategy() -> Iterator[dict[str, str]]:
    """Within the block, this process has no variables of a strategy, so that whatever Accelerate sets can be seen."""
    settings = {key: value for key, value in os.environ.items() if key.startswith(STRATEGY_PREFIXES)}
    try:
        for key in settings:
            del os.environ[key]
        yield dict(os.environ)
    finally:
        os.environ.update(settings)
