"""What the words after ``accelerate launch``, ``torchrun`` or ``deepspeed`` ask for, by these programs' own parsers.

:func:`read` needs the stack and runs in a rank; the rest runs in the test process, and in ranks for what a command
starts itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import shlex
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_trlcompat.launch.program import CommandError
from pytest_trlcompat.launch.strategy import AccelerateLaunch, Strategy, from_accelerate, read_accelerate_config
from pytest_trlcompat.launch.words import LauncherWords
from pytest_trlcompat.strategies import StrategyError, config_keys, families
from pytest_trlcompat.strategies.config_keys import Fixed, Key, Passed, problem_of
from pytest_trlcompat.strategies.family import NO_ENGINE

__all__ = ["NAMES", "Read", "enter", "read", "read_parsed", "strategy_of", "variables_of", "world_size_of"]

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

_OPTIONS: Mapping[str, Mapping[str, Key]] = {
    "accelerate": config_keys.ACCELERATE_OPTIONS,
    "torchrun": config_keys.TORCHRUN_OPTIONS,
    "deepspeed": config_keys.DEEPSPEED_OPTIONS,
}
_NOT_ABOUT_STRATEGY = ("num_processes", "module")
_SAYS_NOTHING = {"dynamo_backend": "no"}
"""Values that are what holds without them, though the parser's default is another."""


@dataclass(frozen=True)
class Read:
    """The words of a launcher.

    Attributes:
        launcher: ``accelerate``, ``torchrun`` or ``deepspeed``.
        target: the script or the module, and what follows it.
        settings: the options whose values are not their defaults.
        size: the number of ranks; ``None`` where the words leave it to the devices that there are.
        gets_local_rank: whether the launcher passes ``--local_rank``.
        words: the launcher's options as they were written, if they were.
        options: of ``accelerate launch``, all of them, as its parser has made them.
        variables: what ``accelerate launch`` would set for ranks, if it was asked.
    """

    launcher: str
    target: tuple[str, ...]
    settings: Mapping[str, Any]
    size: int | None
    gets_local_rank: bool = False
    words: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = None
    variables: Mapping[str, str] | None = None


def read(words: LauncherWords, folder: Path | None = None) -> Read:
    """Parse the words as the launcher would.

    Args:
        folder: the working directory of the command; then Accelerate is asked too what it would set for ranks.

    Raises:
        CommandError: the launcher's own parser refuses them, or they ask for what cannot be honoured here.
        StrategyError: they ask for a strategy that cannot be launched.
        ImportError: the launcher is not installed.
    """
    parsed = _parsed(words.launcher, words.words, words.is_legacy)
    arguments = parsed[_ARGUMENTS[words.launcher]]
    # The script or the module is one word; -m is among the options before it.
    written = words.words[: len(words.words) - len(arguments) - 1]
    result = replace(read_parsed(words.launcher, parsed), words=written)
    asked = None if folder is None else strategy_of(result, folder)
    if asked is None or asked.accelerate is None:
        return result
    return replace(result, variables=variables_of(asked))


def read_parsed(launcher: str, options: Mapping[str, Any]) -> Read:
    """As :func:`read`, for options that the launcher's own parser has already parsed.

    Raises:
        CommandError: they ask for what cannot be honoured here.
    """
    # The command `accelerate` has its parser name the function that reads the options.
    options = {key: value for key, value in options.items() if key != "func"}
    # plain: what the parser makes of a script alone, which is its defaults.
    parsed, plain = dict(options), _parsed(launcher, ("script",))
    script, arguments = parsed.pop(_SCRIPTS[launcher]), parsed.pop(_ARGUMENTS[launcher])
    target = (*(("-m",) if parsed.pop("module") else ()), str(script), *arguments)
    # Only torch.distributed.launch has this option, and has it off by default.
    if not parsed.pop("use_env", True):
        raise CommandError(
            "torch.distributed.launch without --use_env gives the script --local-rank, which ranks do not; say "
            "--use_env, or use torchrun"
        )
    # Accelerate's parser names there which options were given.
    parsed.pop("nondefault", None)
    settings = {key: value for key, value in parsed.items() if value != plain.get(key)}
    _check(launcher, settings)
    return Read(
        launcher=launcher,
        target=target,
        settings={key: value for key, value in settings.items() if _is_about_strategy(launcher, key, value)},
        size=_size(launcher, parsed.get(_SIZES[launcher])),
        gets_local_rank=launcher == "deepspeed" and not parsed.get("no_local_rank"),
        options=dict(options) if launcher == "accelerate" else None,
    )


def _parsed(launcher: str, words: Sequence[str], is_legacy: bool = False) -> dict[str, Any]:
    module, name = ("torch.distributed.launch", "parse_args") if is_legacy else _PARSERS[launcher]
    parser: Any = getattr(importlib.import_module(module), name)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            # DeepSpeed has a function that parses, and no parser.
            parses = launcher == "deepspeed" or is_legacy
            return dict(vars(parser(list(words)) if parses else parser().parse_args(list(words))))
    except SystemExit:
        reason = (printed.getvalue().strip().splitlines() or ["no reason"])[-1]
        raise CommandError(f"{NAMES[launcher]} refuses {shlex.join(words)}: {reason}") from None


def _size(launcher: str, value: Any) -> int | None:
    # DeepSpeed's -1, and words of torchrun's, leave the number to the devices that there are.
    if value in (None, -1, "gpu", "auto", "cpu"):
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise CommandError(f"{NAMES[launcher]}: {value!r} is no number of ranks") from None


def _is_about_strategy(launcher: str, key: str, value: Any) -> bool:
    if launcher != "accelerate" or key in _NOT_ABOUT_STRATEGY or _SAYS_NOTHING.get(key) == value:
        return False
    return isinstance(_OPTIONS[launcher][key], Passed)


def _check(launcher: str, settings: Mapping[str, Any]) -> None:
    known = _OPTIONS[launcher]
    for key, value in settings.items():
        reason = problem_of(known, key, value)
        if reason is None:
            continue
        if isinstance(known.get(key), Fixed):
            raise CommandError(f"{NAMES[launcher]} --{key} {value}: {reason}; leave {key} out")
        raise CommandError(
            f"{NAMES[launcher]} --{key} cannot be honoured: {reason}. Leave it out, or say it by strategy=, options=, "
            "device= or env= of the launch"
        )


def world_size_of(parsed: Read, requested: int | None) -> int | None:
    """The number of ranks, by the words and by the caller.

    Raises:
        CommandError: they contradict each other.
    """
    if None not in (parsed.size, requested) and parsed.size != requested:
        raise CommandError(
            f"world_size={requested} was requested, and {NAMES[parsed.launcher]} is asked for {parsed.size} ranks; say "
            "it once"
        )
    return parsed.size if requested is None else requested


def strategy_of(parsed: Read, folder: Path) -> Strategy | None:
    """The strategy that the words ask for; ``None`` where they leave it open.

    Args:
        folder: the working directory, from which the configuration file's path is meant.

    Raises:
        StrategyError: they ask for one that cannot be launched.
    """
    settings = dict(parsed.settings)
    file = settings.pop("config_file", None)
    if file is None and not settings:
        return None
    path = folder / (file or "accelerate launch")
    config = read_accelerate_config(path) if file is not None else {}
    with_section = {family.section: family for family in families() if family.section}
    types = {family.flag: family.accelerate_type for family in with_section.values()}
    for flag, kind in (*types.items(), ("multi_gpu", "MULTI_GPU")):
        if settings.pop(flag, False):
            config["distributed_type"] = kind
    kind = str(config.setdefault("distributed_type", "MULTI_GPU")).upper()
    for section, family in with_section.items():
        asked = {key: value for key, value in settings.items() if key in config_keys.ACCELERATE_SECTIONS[section]}
        if asked and kind != family.accelerate_type:
            raise CommandError(f"accelerate launch --{min(asked)} has no effect without --{family.flag}; add it")
        if asked:
            in_file = dict(config.get(section) or {})
            # By their full names, so that an option takes the place of the same key in the file.
            config[section] = {config_keys.section_key(section, name): value for name, value in in_file.items()} | asked
    words = parsed.words if file is None else (*parsed.words, "--config_file", str(path))
    launch = AccelerateLaunch(
        words=words,
        folder=str(folder),
        options=parsed.options,
        config_file=str(path) if file is not None else None,
        variables=parsed.variables,
    )
    return from_accelerate(config, path, launch)


def variables_of(asked: Strategy) -> dict[str, str]:
    """What ``accelerate launch`` sets for the ranks of a strategy that a user's file or options say, by its own code.

    Runs in a process that has the stack.

    Raises:
        StrategyError: Accelerate refuses them, or reads another strategy in them than this package has.
    """
    from pytest_trlcompat.launch import accelerate_launch

    launch = asked.accelerate
    assert launch is not None
    if importlib.util.find_spec("accelerate") is None:
        return _without_accelerate(asked, launch)
    options = launch.options if launch.options is not None else _parsed("accelerate", (*launch.words, "script"))
    variables = accelerate_launch.variables(options, Path(launch.folder))
    source = launch.config_file or "accelerate launch"
    described, seen = asked.family.describe(asked.name, asked.settings), _seen(variables)
    if described != seen:
        raise StrategyError(
            f"{source}: read here as {described}, and by Accelerate as {seen}; this is a defect of ours"
        )
    return variables


def _without_accelerate(asked: Strategy, launch: AccelerateLaunch) -> dict[str, str]:
    """Without Accelerate nothing reads what the file says about engines."""
    if asked.settings is not None or launch.config_file is None:
        raise StrategyError(f"{launch.config_file or 'accelerate launch'}: Accelerate is not installed")
    config = read_accelerate_config(Path(launch.config_file))
    return {"ACCELERATE_MIXED_PRECISION": str(config.get("mixed_precision", "no"))}


def _seen(variables: Mapping[str, str]) -> str:
    texts = (family.describe_variables(variables) for family in families())
    return next((text for text in texts if text is not None), NO_ENGINE)


def enter(asked: Strategy, running: Strategy, environment: MutableMapping[str, str], folder: Path) -> None:
    """Give a rank of a launch the variables of a strategy that a launcher in it asks for, and none of the launch's own.

    Args:
        running: the strategy of the launch.
        environment: of the rank; it is changed.
        folder: for a DeepSpeed configuration.

    Raises:
        StrategyError: Accelerate refuses what it is asked for.
    """
    if asked.accelerate is not None and asked.accelerate.variables is None:
        asked = replace(asked, accelerate=replace(asked.accelerate, variables=variables_of(asked)))
    for name in running.environment(folder):
        environment.pop(name, None)
    environment.update(asked.environment(folder))
