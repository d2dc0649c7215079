"""A strategy as a launch has it: its settings from options, or from a user's own file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_trlcompat import stack
from pytest_trlcompat.strategies import NAMES, Family, StrategyAbsent, StrategyError, families, family_of
from pytest_trlcompat.strategies.config_keys import problems_of_accelerate

__all__ = [
    "STRATEGY_PREFIXES",
    "AccelerateLaunch",
    "Strategy",
    "accelerate_config",
    "check_present",
    "from_accelerate",
    "is_file_name",
    "read_accelerate_config",
    "strategy",
]

STRATEGY_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "TP_SIZE")
"""How the variables begin by which Accelerate's launcher tells ranks their strategy."""


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
        name: one of :data:`pytest_trlcompat.strategies.NAMES`.
        settings: of its family: the DeepSpeed configuration of ``zero1`` to ``zero3``; the ``FSDP_*`` settings of
            ``fsdp1`` and ``fsdp2`` without their prefix, lower case; else ``None``.
        more: further environment variables for every rank.
        world_size: number of ranks in a configuration file.
        accelerate: the user's own file or options, which then decide alone; ``settings`` only describe them.
        needs_cpu: whether that asks for the CPU, which the launch's device must then be.
    """

    name: str
    settings: dict[str, Any] | None = None
    more: dict[str, str] = field(default_factory=dict)
    world_size: int | None = None
    accelerate: AccelerateLaunch | None = None
    needs_cpu: bool = False

    @property
    def family(self) -> Family:
        return family_of(self.name)

    @property
    def config(self) -> dict[str, Any] | None:
        """The configuration of DeepSpeed, if it is used."""
        return self.settings if self.family.accelerate_type == "DEEPSPEED" else None

    @property
    def fsdp(self) -> dict[str, Any] | None:
        """The settings of FSDP, if it is used."""
        return self.settings if self.family.accelerate_type == "FSDP" else None

    @property
    def zero_stage(self) -> int | None:
        return None if self.config is None else int(self.config["zero_optimization"]["stage"])

    @property
    def fsdp_version(self) -> int | None:
        return None if self.fsdp is None else int(self.name[-1])

    @property
    def shards_parameters(self) -> bool:
        """Whether each rank keeps only its part of every parameter, so that a full copy would be a downgrade."""
        return self.family.shards_parameters(self.name, self.settings)

    def environment(self, folder: Path) -> dict[str, str]:
        """The variables for every rank; writes the DeepSpeed configuration into ``folder`` where there is one.

        Raises:
            RuntimeError: it is a user's own file, and Accelerate was not asked yet.
        """
        if self.accelerate is None:
            return {**self.family.variables(self.name, self.settings, folder), **self.more}
        if self.accelerate.variables is None:
            raise RuntimeError(f"{self.accelerate.words} were not read by Accelerate; a launcher does that")
        return {**self.accelerate.variables, **self.more}


def strategy(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """Make a strategy from its name and options.

    Args:
        name: one of :data:`pytest_trlcompat.strategies.NAMES`.
        options: for ``zero*`` DeepSpeed configuration, merged into the defaults key by key. ``config`` may be
            the path of a JSON file instead, ``{"config": "ds.json"}``, which gets no defaults; other options are merged
            into it. For ``fsdp*`` the names of Accelerate's FSDP settings in lower case and without ``FSDP_``
            (``sharding_strategy="NO_SHARD"``); for the others none.

    Raises:
        StrategyError: for an unknown name or option, or options of a strategy that has none.
    """
    try:
        family = family_of(name)
    except KeyError:
        hint = f"; accelerate_config({name!r}) reads a configuration file" if is_file_name(name) else ""
        raise StrategyError(f"unknown strategy {name!r}; known are {', '.join(NAMES)}{hint}") from None
    return Strategy(name, family.settings(name, options or {}))


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
    for need in chosen.family.needs:
        version = versions.get(need.package)
        # A launch does not know its trainer, so it cannot judge a need that some trainers do not have.
        if version is None or need.except_for or stack.satisfied({need.package: f">={need.since}"}, versions):
            continue
        raise StrategyAbsent(
            f"strategy {chosen.name!r} was requested, but this stack has {need.package} {version}: {need.reason}. "
            f"Use {need.requirement}, or another strategy ({', '.join(NAMES)})."
        )


def accelerate_config(path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> Strategy:
    """Read an Accelerate configuration file, YAML or JSON, as ``accelerate config`` writes it.

    A launch under it passes the file to Accelerate's own launcher as it is; nothing is added. What a launch does with
    each key is in ``pytest_trlcompat/strategies/config_keys.py``.

    Args:
        folder: the working directory of the ranks, from which the path of a DeepSpeed configuration in it is meant; by
            default this process's.

    Raises:
        StrategyError: it cannot be read, has a key that nobody reads or no launch can honour, or requests none of
            :data:`pytest_trlcompat.strategies.NAMES`.
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
    if problems := list(problems_of_accelerate(config)):
        raise StrategyError(f"{path} cannot be honoured: {'; '.join(problems)}")
    kind = str(config.get("distributed_type", "NO")).upper()
    # What YAML makes of NO without quotes; Accelerate goes on as with NO.
    kind = "NO" if kind == "FALSE" else kind
    size = int(config["num_processes"]) if config.get("num_processes") is not None else None
    with_section = {family.accelerate_type: family for family in families() if family.section}
    if kind in with_section:
        family = with_section[kind]
        name, settings = family.read_section(config.get(family.section) or {}, path, Path(launch.folder))
        described = Strategy(name, settings)
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


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "1")
