"""Settings: the value of each and its source, and the device that launches use.

A setting is read from the command line, else from the environment, else from the ini file. Must not import torch: the
device is determined from device nodes and from torch's files.
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
    "RELAYED_KEY",
    "SPECS",
    "WATCHED_KEY",
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
    """A setting has an invalid value, or one that this machine does not support."""


class Source(str, Enum):
    """The source of a setting, in order of precedence."""

    OPTION = "option"
    ENVIRONMENT = "environment"
    INI = "ini"
    DEFAULT = "default"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Spec:
    """The names of one setting, and how its text is parsed.

    Attributes:
        parse: text to value; raises ``ValueError`` that says what is valid.
        kind: ``"flag"`` takes no value on the command line, ``"list"`` may be repeated, and so may ``"words"``, which
            stand side by side as well.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    metavar: str | None = None
    kind: Literal["value", "flag", "list", "words"] = "value"

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
    """A value and its source; ``where`` names what a person would have to change."""

    value: T
    source: Source = Source.DEFAULT
    where: str = "default"


@dataclass(frozen=True)
class Settings:
    """All settings of a pytest run.

    Attributes:
        device: as requested; :func:`resolve_device` returns the one in use.
        results: file to which verdicts are appended, one JSON line each.
        resume: whether verdicts that ``results`` contains are not measured again.
        issue: ids of the known issues whose suites run; empty: all.
        subject: the one for which they run, ``upstream`` or ``corrected``; ``None``: both.
        trainer: classes of the project under test, of which the end of a run says which known issues bite them.
        timeout: seconds that a launch may take.
        preload: modules of the project under test that the warm server imports.
        debug_rank: the rank that gets the terminal, for a debugger; ``None``: none.
        nnodes: number of machines that run these tests together.
        node_rank: number of this machine among them.
        rdzv_endpoint: address of their rendezvous, ``HOST:PORT`` of machine 0.
    """

    device: Setting[str]
    results: Setting[Path | None]
    resume: Setting[bool]
    issue: Setting[tuple[str, ...]]
    subject: Setting[str | None]
    trainer: Setting[tuple[str, ...]]
    timeout: Setting[float]
    preload: Setting[tuple[str, ...]]
    debug_rank: Setting[int | None]
    nnodes: Setting[int]
    node_rank: Setting[int]
    rdzv_endpoint: Setting[str | None]

    def changed(self) -> dict[str, Setting[Any]]:
        """The settings that are not at their default, by name."""
        every = {spec.name: getattr(self, spec.name) for spec in SPECS}
        return {name: setting for name, setting in every.items() if setting.source is not Source.DEFAULT}


@dataclass(frozen=True)
class Device:
    """The device that launches use, and why."""

    name: str
    why: str = field(compare=False)


KEY = pytest.StashKey[Settings]()
"""Key of the settings: ``config.stash[settings.KEY]``."""

DEVICE_KEY = pytest.StashKey[Device]()
"""Key of the device in use."""

RELAYED_KEY = pytest.StashKey[bool]()
"""Key of whether the running test gets what its ranks print, warn of and log; unset before the first one."""

WATCHED_KEY = pytest.StashKey[bool]()
"""Key of whether trainings of the running test in the test process are looked at: of a project that uses the plugin."""


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


def _module(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise ValueError("write the name of a module, for example my_project.train")
    return text


def _class(text: str) -> str:
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError("write the module and the name of a class, for example my_project.train:MyTrainer")
    return text


def _subject(text: str) -> str:
    if text not in SUBJECTS:
        raise ValueError(f"choose one of {', '.join(SUBJECTS)}")
    return text


_SEVERAL = ("list", "words")
"""Kinds of settings that have several values."""

SPECS: tuple[Spec, ...] = (
    Spec(
        "device",
        parse=_device,
        default="auto",
        metavar="{" + ",".join(DEVICES) + "}",
        help="device for launches; auto: cuda if there is an NVIDIA GPU and a CUDA build of torch, else the software "
        "accelerator",
    ),
    Spec(
        "results",
        parse=_file,
        default=None,
        metavar="FILE",
        help="append each verdict to FILE, as one line of JSON",
    ),
    Spec(
        "resume",
        parse=_flag,
        default=False,
        kind="flag",
        help="do not measure verdicts again that the results file already contains",
    ),
    Spec(
        "issue",
        parse=_issue,
        default=(),
        metavar="ID",
        kind="list",
        help="run only the suites of this known issue; may be repeated",
    ),
    Spec(
        "subject",
        parse=_subject,
        default=None,
        metavar="{" + ",".join(SUBJECTS) + "}",
        help="run the suites of known issues only for TRL's own trainer (upstream), or only for the corrected one",
    ),
    Spec(
        "trainer",
        parse=_class,
        default=(),
        metavar="MODULE:CLASS",
        kind="words",
        help="say at the end which known issues, of those that the suites showed, bite this trainer of yours",
    ),
    Spec("timeout", parse=_seconds, default=120.0, metavar="SECONDS", help="seconds that a launch may take"),
    Spec(
        "preload",
        parse=_module,
        default=(),
        metavar="MODULE",
        kind="words",
        help="import MODULE once, with the stack, and not in each launch; may be repeated, or name several",
    ),
    Spec(
        "debug_rank",
        parse=_count,
        default=None,
        metavar="N",
        help="lend rank N of each launch the terminal, for breakpoint() and --pdb, without timeouts",
    ),
    Spec(
        "nnodes",
        parse=_count,
        default=1,
        metavar="N",
        help="number of machines that run these tests together, each with this option, as for torchrun",
    ),
    Spec("node_rank", parse=_count, default=0, metavar="N", help="number of this machine among them, from 0"),
    Spec(
        "rdzv_endpoint",
        parse=str,
        default=None,
        metavar="HOST:PORT",
        help="address of machine 0 for the rendezvous, reachable from all machines",
    ),
)


def add_options(parser: pytest.Parser) -> None:
    """Register each setting as an option and an ini value in the group ``trlcompat``."""
    group = parser.getgroup("trlcompat", "trlcompat: compatibility of the RL training stack")
    for spec in SPECS:
        # No argparse type and no choices: one parser handles all sources, and names the source of an invalid value.
        form: dict[str, Any] = {"metavar": spec.metavar}
        if spec.kind == "flag":
            form = {"action": "store_const", "const": "true"}
        elif spec.kind in _SEVERAL:
            form["action"] = "append"
        group.addoption(spec.option, dest=spec.dest, default=None, help=f"{spec.help} [{spec.variable}]", **form)
        ini_type: Literal["string", "bool", "linelist"] = "string"
        if spec.kind == "flag":
            ini_type = "bool"
        elif spec.kind in _SEVERAL:
            ini_type = "linelist"
        # None, so that an ini file which says false differs from one that says nothing.
        parser.addini(spec.ini, f"default of {spec.option}", type=ini_type, default=None)


def read_settings(config: pytest.Config, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read every setting.

    Raises:
        SettingError: for an invalid value; names its source.
    """
    return Settings(**{spec.name: _read(spec, config, environ) for spec in SPECS})


def _read(spec: Spec, config: pytest.Config, environ: Mapping[str, str]) -> Setting[Any]:
    value = config.getoption(spec.dest, default=None)
    if value is not None:
        return _parsed(spec, value, Source.OPTION, f"option {spec.option}")
    variable = environ.get(spec.variable)
    if variable:
        value = variable.split() if spec.kind in _SEVERAL else variable
        return _parsed(spec, value, Source.ENVIRONMENT, f"environment {spec.variable}")
    try:
        value = config.getini(spec.ini)
    except (TypeError, ValueError, pytest.UsageError) as error:  # an ini value of another type
        raise SettingError(f"ini {spec.ini}: {error}") from error
    if value is not None:
        # From the ini file's own folder, as pytest's own paths there.
        if spec.name == "results" and config.inipath is not None and value:
            value = str(config.inipath.parent / value)
        return _parsed(spec, value, Source.INI, f"ini {spec.ini}")
    return Setting(spec.default)


def _parsed(spec: Spec, value: Any, source: Source, where: str) -> Setting[Any]:
    try:
        if spec.kind == "words":
            value = [word for text in value for word in text.split()]
        if spec.kind in _SEVERAL:
            return Setting(tuple(spec.parse(text) for text in value), source, where)
        return Setting(value if isinstance(value, bool) else spec.parse(value), source, where)
    except ValueError as error:
        raise SettingError(f"{where}: invalid value {value!r}; {error}") from error


def resolve_device(setting: Setting[str], obstacle: Callable[[], str | None] | None = None) -> Device:
    """The device that launches use.

    Args:
        setting: the requested device.
        obstacle: why CUDA cannot be used, ``None`` if it can; :func:`cuda_obstacle` by default.

    Raises:
        SettingError: when CUDA was requested and cannot be used; no other device is used instead.
    """
    if setting.value in ("software", "cpu"):
        return Device(setting.value, setting.where)
    reason = (obstacle or cuda_obstacle)()
    if reason is None:
        why = "an NVIDIA device and a CUDA build of torch" if setting.value == "auto" else setting.where
        return Device("cuda", why)
    if setting.value == "auto":
        return Device("software", reason)
    raise SettingError(
        f"{setting.where} requests 'cuda', but {reason}; "
        "install a CUDA build of torch on a machine with an NVIDIA GPU, or choose 'software' or 'auto'"
    )


def cuda_obstacle(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> str | None:
    """Why CUDA cannot be used here, or ``None``."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    # NoDevFiles is what Slurm says where a job has no GPU.
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
