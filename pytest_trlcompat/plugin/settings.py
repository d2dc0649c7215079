"""Settings: each one's value and where it came from, and the device that is in force.

A setting is looked for on the command line, then in the environment, then in the ini file. Must not import torch:
which device is in force is decided from device nodes and from torch's files.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pytest

from pytest_trlcompat import stack

__all__ = [
    "DEVICES",
    "DEVICE_KEY",
    "KEY",
    "SPECS",
    "Device",
    "Setting",
    "SettingError",
    "Settings",
    "Source",
    "Spec",
    "add_options",
    "cuda_obstacle",
    "read_settings",
    "resolve_device",
]

T = TypeVar("T")

DEVICES = ("auto", "software", "cuda", "cpu")
SUBJECTS = ("upstream", "corrected")


class SettingError(ValueError):
    """A setting has a value that makes no sense, or that this machine cannot serve."""


class Source(str, Enum):
    """Where a setting came from, nearest to the user first."""

    OPTION = "option"
    ENVIRONMENT = "environment"
    INI = "ini"
    DEFAULT = "default"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Spec:
    """How one setting is called in each place, and how its text becomes a value.

    Attributes:
        parse: text to value; raises ``ValueError`` with what would have been right.
        kind: ``"flag"`` takes no value on the command line, ``"list"`` may be given several times.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    metavar: str | None = None
    kind: Literal["value", "flag", "list"] = "value"

    @property
    def option(self) -> str:
        return f"--trlcompat-{self.name.replace('_', '-')}"

    @property
    def dest(self) -> str:
        return f"trlcompat_{self.name}"

    @property
    def ini(self) -> str:
        return f"trlcompat_{self.name}"

    @property
    def variable(self) -> str:
        return f"TRLCOMPAT_{self.name.upper()}"


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value, and where it came from: ``where`` is what a person would have to change."""

    value: T
    source: Source = Source.DEFAULT
    where: str = "default"


@dataclass(frozen=True)
class Settings:
    """All settings of a pytest run.

    Attributes:
        device: as asked for; :func:`resolve_device` tells which one is in force.
        results: file to which verdicts are appended, one JSON line each.
        resume: whether verdicts that stand in ``results`` already are taken from there.
        issue: ids of the known issues to which the suites are limited; empty means all.
        subject: the one to which they are limited, ``upstream`` or ``corrected``; ``None`` means both.
        timeout: seconds that a launch may take.
        nnodes: number of machines that run these tests together.
        node_rank: number of this machine among them.
        rdzv_endpoint: where they meet, ``HOST:PORT`` of machine 0.
    """

    device: Setting[str]
    results: Setting[Path | None]
    resume: Setting[bool]
    issue: Setting[tuple[str, ...]]
    subject: Setting[str | None]
    timeout: Setting[float]
    nnodes: Setting[int]
    node_rank: Setting[int]
    rdzv_endpoint: Setting[str | None]

    def changed(self) -> dict[str, Setting[Any]]:
        """The settings that somebody set, by name."""
        every = {spec.name: getattr(self, spec.name) for spec in SPECS}
        return {name: setting for name, setting in every.items() if setting.source is not Source.DEFAULT}


@dataclass(frozen=True)
class Device:
    """The device that launches take, and why that one."""

    name: str
    why: str = field(compare=False)


KEY = pytest.StashKey[Settings]()
"""Where the plugin keeps the settings: ``config.stash[settings.KEY]``."""

DEVICE_KEY = pytest.StashKey[Device]()
"""Where it keeps the device in force."""


def _device(text: str) -> str:
    if text not in DEVICES:
        raise ValueError(f"choose one of {', '.join(DEVICES)}")
    return text


def _flag(text: str) -> bool:
    answers = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in answers:
        raise ValueError("write true or false")
    return answers[text.lower()]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError("write a positive number of seconds")
    return seconds


def _count(text: str) -> int:
    if not text.isdigit():
        raise ValueError("write a number")
    return int(text)


def _file(text: str) -> Path:
    if not text:
        raise ValueError("write the path of a file")
    if Path(text).is_dir():
        raise ValueError("this is a folder; write the path of a file")
    return Path(text).absolute()


def _issue(text: str) -> str:
    if not text or any(letter.isspace() for letter in text):
        raise ValueError("write the id of a known issue, for example grpo-logits-to-keep")
    return text


def _subject(text: str) -> str:
    if text not in SUBJECTS:
        raise ValueError(f"choose one of {', '.join(SUBJECTS)}")
    return text


SPECS: tuple[Spec, ...] = (
    Spec(
        "device",
        parse=_device,
        default="auto",
        metavar="{" + ",".join(DEVICES) + "}",
        help="device of the launches; auto takes cuda where there is an NVIDIA GPU and a CUDA build of torch, "
        "else the software accelerator",
    ),
    Spec(
        "results",
        parse=_file,
        default=None,
        metavar="FILE",
        help="append each verdict to FILE as one line of JSON, as it comes in",
    ),
    Spec(
        "resume",
        parse=_flag,
        default=False,
        kind="flag",
        help="take verdicts that stand in the results file already, and do not measure them again",
    ),
    Spec(
        "issue",
        parse=_issue,
        default=(),
        metavar="ID",
        kind="list",
        help="run the suites of this known issue only; may be given several times",
    ),
    Spec(
        "subject",
        parse=_subject,
        default=None,
        metavar="{" + ",".join(SUBJECTS) + "}",
        help="of the suites of known issues run those for TRL's own trainer alone, or for the corrected one",
    ),
    Spec("timeout", parse=_seconds, default=120.0, metavar="SECONDS", help="seconds that a launch may take"),
    Spec(
        "nnodes",
        parse=_count,
        default=1,
        metavar="N",
        help="machines that run these tests together, each with this option, as for torchrun",
    ),
    Spec("node_rank", parse=_count, default=0, metavar="N", help="number of this machine among them, from 0"),
    Spec(
        "rdzv_endpoint",
        parse=str,
        default=None,
        metavar="HOST:PORT",
        help="where the machines meet: an address of machine 0 that all of them reach",
    ),
)


def add_options(parser: pytest.Parser) -> None:
    """Register each setting as an option and an ini value in the group ``trlcompat``."""
    group = parser.getgroup("trlcompat", "trlcompat: compatibility of the RL training stack")
    for spec in SPECS:
        # No argparse type and no choices: one parser serves all three places, and says where a bad value stands.
        form: dict[str, Any] = {"metavar": spec.metavar}
        if spec.kind == "flag":
            form = {"action": "store_const", "const": "true"}
        elif spec.kind == "list":
            form["action"] = "append"
        group.addoption(spec.option, dest=spec.dest, default=None, help=f"{spec.help} [{spec.variable}]", **form)
        ini_type: Literal["string", "bool", "linelist"] = "string"
        if spec.kind == "flag":
            ini_type = "bool"
        elif spec.kind == "list":
            ini_type = "linelist"
        parser.addini(spec.ini, f"default of {spec.option}", type=ini_type, default=None)


def read_settings(config: pytest.Config, environ: Mapping[str, str] = os.environ) -> Settings:
    """Find every setting.

    Raises:
        SettingError: for a value that cannot be parsed; it names the place where the value stands.
    """
    return Settings(**{spec.name: _read(spec, config, environ) for spec in SPECS})


def _read(spec: Spec, config: pytest.Config, environ: Mapping[str, str]) -> Setting[Any]:
    given = config.getoption(spec.dest, default=None)
    if given is not None:
        return _parsed(spec, given, Source.OPTION, f"option {spec.option}")
    variable = environ.get(spec.variable)
    if variable:
        given = variable.split() if spec.kind == "list" else variable
        return _parsed(spec, given, Source.ENVIRONMENT, f"environment {spec.variable}")
    try:
        given = config.getini(spec.ini)
    except (TypeError, ValueError, pytest.UsageError) as error:  # an ini value of another type
        raise SettingError(f"ini {spec.ini}: {error}") from error
    if given is not None:
        if spec.name == "results" and config.inipath is not None and given:
            given = str(config.inipath.parent / given)
        return _parsed(spec, given, Source.INI, f"ini {spec.ini}")
    return Setting(spec.default)


def _parsed(spec: Spec, given: Any, source: Source, where: str) -> Setting[Any]:
    try:
        if spec.kind == "list":
            return Setting(tuple(spec.parse(text) for text in given), source, where)
        return Setting(given if isinstance(given, bool) else spec.parse(given), source, where)
    except ValueError as error:
        raise SettingError(f"{where}: {given!r} makes no sense; {error}") from error


def resolve_device(setting: Setting[str], obstacle: Callable[[], str | None] | None = None) -> Device:
    """The device in force.

    Args:
        setting: the device that was asked for.
        obstacle: why CUDA cannot be used, ``None`` if it can; :func:`cuda_obstacle` by default.

    Raises:
        SettingError: CUDA was asked for and cannot be used. Nothing else is taken instead.
    """
    if setting.value in ("software", "cpu"):
        return Device(setting.value, setting.where)
    found = (obstacle or cuda_obstacle)()
    if found is None:
        why = "an NVIDIA device and a CUDA build of torch" if setting.value == "auto" else setting.where
        return Device("cuda", why)
    if setting.value == "auto":
        return Device("software", found)
    raise SettingError(
        f"{setting.where} asks for 'cuda', but {found}; "
        "install a CUDA build of torch on a machine with an NVIDIA GPU, or ask for 'software' or 'auto'"
    )


def cuda_obstacle(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> str | None:
    """Why CUDA cannot be used here, or ``None``."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={visible} hides every GPU"
    # nvidia0, nvidia1, ... on Linux; dxg is the GPU of the Windows subsystem for Linux.
    if not any(node.name[6:].isdigit() for node in devices.glob("nvidia*")) and not (devices / "dxg").exists():
        return "there is no NVIDIA device"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    if _cuda_of_torch(Path(spec.origin).parent / "version.py") is None:
        return f"torch {stack.installed().get('torch', '')} is not a CUDA build"
    return None


def _cuda_of_torch(version_file: Path) -> str | None:
    """The value of ``cuda`` in ``torch/version.py``, read without running it; ``None`` for other builds."""
    try:
        module = ast.parse(version_file.read_text())
    except (OSError, SyntaxError):
        return None
    for statement in module.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets)
        if named and isinstance(getattr(statement, "value", None), ast.Constant):
            return statement.value.value or None  # type: ignore[attr-defined]
    return None
