"""What a command that starts a training says: of ``trl``, ``accelerate launch``, ``torchrun``, ``deepspeed``, Python.

The command is read as a shell reads words, and never run. Of a script that it names the source is read, as text, for
the trainer that it makes. Imports the standard library alone.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_trlcompat.training.argument_names import words
from pytest_trlcompat.training.axes import CLASSES, TRAINERS
from pytest_trlcompat.training.errors import TrainingError
from pytest_trlcompat.training.reading.configs import of_settings
from pytest_trlcompat.training.reading.engines import of_accelerate
from pytest_trlcompat.training.reading.files import read_mapping, scalar, text_of
from pytest_trlcompat.training.training import Training, joined

__all__ = ["of_command", "trainer_of_script"]

_ENDS = {"&&", "||", ";", "|", "&", ">", ">>", "2>&1", "<"}
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "trl", "python", "python3", "llamafactory-cli", "axolotl")
_FLAGS = frozenset(
    words("""
        multi_gpu cpu use_cpu use_deepspeed use_fsdp tpu quiet debug no_python standalone m module same_network
        rdzv_conf no_local_rank zero3_init_flag fsdp_use_orig_params dynamo_use_dynamic no_ssh use_megatron_lm
        ipex
    """)
)
"""Options of launchers that take no value."""


@dataclass
class _Words:
    """The options and the positional words of a command, or of a part of it."""

    options: dict[str, Any] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)


def of_command(command: str, folder: Path | None = None) -> Training:
    """The training that a command starts.

    Args:
        folder: in which it is started; the current one by default.

    Raises:
        TrainingError: no command that starts a training, or a file that it names cannot be read.
    """
    try:
        line = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise TrainingError(f"a command was expected, its quotes do not match: {error}") from error
    while line and (_VARIABLE.match(line[0]) or line[0] in ("env", "nohup", "srun", "uv", "run", "poetry")):
        line.pop(0)
    line = line[: next((place for place, word in enumerate(line) if word in _ENDS), len(line))]
    program = Path(line[0]).name if line else ""
    if program not in _LAUNCHERS:
        raise TrainingError(
            f"a command of {', '.join(_LAUNCHERS)} was expected, {program or 'nothing'!r} was found; give the command "
            "that starts the training, in quotes, or the file with its settings"
        )
    if program == "trl":
        return _of_trl(line[1:], folder)
    if program in ("llamafactory-cli", "axolotl"):
        return _of_settings_file(program, line[1:], folder)
    launcher, script, rest = _split(program, line[1:])
    return joined([_of_launcher(program, launcher, folder), _of_script(script, rest, folder)])


def _split(program: str, line: Sequence[str]) -> tuple[_Words, str, list[str]]:
    """The launcher's options, the script, and what the script is given."""
    rest = list(line)
    if program == "accelerate":
        if rest[:1] != ["launch"]:
            raise TrainingError(f"accelerate launch was expected, accelerate {' '.join(rest[:1])} was found")
        rest.pop(0)
    launcher = _Words()
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            return launcher, word, rest
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in ("m", "module") and rest:
            return launcher, rest.pop(0), rest
        if equals:
            launcher.options[name] = scalar(value)
        elif program.startswith("python") or name in _FLAGS or not rest:
            launcher.options[name] = True
        else:
            launcher.options[name] = scalar(rest.pop(0))
    raise TrainingError(f"{program}: a script to start was expected, there is none in the command; add it")


def _of_launcher(program: str, launcher: _Words, folder: Path | None) -> Training:
    options = launcher.options
    if program == "accelerate":
        file = options.get("config_file")
        document = read_mapping((folder or Path()) / str(file)) if file else {}
        if not file and not {"multi_gpu", "use_deepspeed", "use_fsdp", "num_processes", "cpu"} & options.keys():
            return Training(notes=("accelerate launch without --config_file takes this machine's own file: give it",))
        plain = {name: value for name, value in options.items() if name != "config_file"}
        for flag, kind in (("multi_gpu", "MULTI_GPU"), ("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP")):
            if plain.pop(flag, False):
                document["distributed_type"] = kind
        document.setdefault("distributed_type", "MULTI_GPU" if (options.get("num_processes") or 1) != 1 else "NO")
        section = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config"}.get(
            str(document["distributed_type"]).upper()
        )
        top: dict[str, Any] = {name: plain[name] for name in ("num_processes", "mixed_precision") if name in plain}
        inner = {name: value for name, value in plain.items() if name not in top}
        if section and inner:
            document[section] = {**(document.get(section) or {}), **inner}
        return of_accelerate({**document, **top}, str(file or "accelerate launch"), folder)
    if program.startswith("python"):
        return Training(values={"parallel.strategy": "single", "parallel.processes": 1})
    number = options.get("nproc_per_node", options.get("num_gpus"))
    nodes = options.get("nnodes", options.get("num_nodes", 1))
    values: dict[str, Any] = {"parallel.strategy": "ddp"}
    if isinstance(number, int) and isinstance(nodes, int):
        values["parallel.processes"] = number * nodes
        values["parallel.strategy"] = "ddp" if number * nodes > 1 else "single"
    return Training(values=values)


def _options(line: Sequence[str]) -> _Words:
    """Options as ``HfArgumentParser`` takes them: with one value, with several, or alone."""
    found, name = _Words(), ""
    values: list[Any] = []

    def finish() -> None:
        if name:
            if not values and name.startswith("no_"):
                found.options[name.removeprefix("no_")] = False
            else:
                found.options[name] = values[0] if len(values) == 1 else values or True

    for word in line:
        # A negative number is a value, and no option.
        if word.startswith("--") or (word.startswith("-") and not re.match(r"-[\d.]", word)):
            finish()
            name, equals, value = word.lstrip("-").partition("=")
            name, values = name.replace("-", "_"), [scalar(value)] if equals else []
        elif name:
            values.append(scalar(word))
        else:
            found.positional.append(word)
    finish()
    return found


def _of_trl(line: Sequence[str], folder: Path | None) -> Training:
    method, rest = (line[0] if line else ""), line[1:]
    if method not in TRAINERS or method == "trainer":
        raise TrainingError(f"trl with one of its trainers, such as trl sft, was expected, trl {method} was found")
    given = _options(rest).options
    launch = {name: given.pop(name) for name in ("accelerate_config", "num_processes") if name in given}
    training = _of_options(given, f"trl {method}", folder, method)
    if "adapter.type" not in training.values:  # use_peft of its command line is off by default
        training = joined([Training(values={"adapter.type": None}), training])
    config = str(launch.get("accelerate_config", ""))
    if not launch:
        note = "trl starts as many processes as Accelerate's own file says, or one for each device: give the file"
        return joined([training, Training(notes=(note,))])
    named: Mapping[str, Any] = {
        "single_gpu": {"distributed_type": "NO", "num_processes": 1},
        "multi_gpu": {"distributed_type": "MULTI_GPU"},
        **{f"zero{n}": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": n}} for n in (1, 2, 3)},
        **{f"fsdp{n}": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": n}} for n in (1, 2)},
    }
    document: dict[str, Any] = dict(named.get(config, {}))
    if config and not document:
        document = read_mapping((folder or Path()) / config)
    if "num_processes" in launch:
        document["num_processes"] = launch["num_processes"]
    document.setdefault("distributed_type", "MULTI_GPU" if document.get("num_processes") != 1 else "NO")
    return joined([of_accelerate(document, config or f"trl {method}", folder), training])


def _of_options(options: dict[str, Any], source: str, folder: Path | None, trainer: str) -> Training:
    """A file of settings, where ``--config`` names one, and options, which win over it."""
    file = options.pop("config", None)
    document = read_mapping((folder or Path()) / str(file)) if file else {}
    return of_settings({**document, **options}, str(file or source), folder, trainer)


def _of_script(script: str, line: Sequence[str], folder: Path | None) -> Training:
    found = _options(line)
    path = (folder or Path()) / script
    trainer, adapts, notes = trainer_of_script(path) if path.is_file() else (_trainer_by_name(script), None, ())
    if not path.is_file() and trainer:
        notes = (f"{script} is not here: that it trains with {TRAINERS[trainer]} is taken from its name",)
    file = next((word for word in found.positional if word.endswith((".yaml", ".yml", ".json"))), None)
    if file and "config" not in found.options:
        found.options["config"] = file
    training = _of_options(found.options, script, folder, trainer)
    if adapts is False and "adapter.type" not in training.values:
        training = joined([training, Training(values={"adapter.type": None})])
    return joined([training, Training(notes=notes)])


def _of_settings_file(program: str, line: Sequence[str], folder: Path | None) -> Training:
    file = next((word for word in line if word.endswith((".yaml", ".yml", ".json"))), None)
    if file is None:
        raise TrainingError(f"{program}: a file of settings was expected in the command, there is none; add it")
    found = _options(line[line.index(file) + 1 :])
    return of_settings({**read_mapping((folder or Path()) / file), **found.options}, file, folder)


def trainer_of_script(path: Path) -> tuple[str, bool | None, tuple[str, ...]]:
    """The trainer that a script makes, whether it can make an adapter, and notes. The script is not run.

    The trainer is empty where the source has none of TRL's, or several. ``None``: whether there is an adapter depends
    on what the script is given.
    """
    text = text_of(path)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        return "", None, (f"{path.name} cannot be read as Python ({error}): say the trainer by --trainer",)
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    bases = {
        base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    trainers = sorted({CLASSES[name] for name in called | bases if name in CLASSES})
    adapts = None if re.search(r"peft|lora", text, re.IGNORECASE) else False
    if len(trainers) == 1:
        return trainers[0], adapts, ()
    reason = f"makes {', '.join(trainers)}" if trainers else "makes no trainer of TRL's by name"
    return "", adapts, (f"{path.name} {reason}: say the trainer by --trainer",)


def _trainer_by_name(script: str) -> str:
    line = set(re.split(r"[^a-z0-9]+", script.rpartition("/")[2].removesuffix(".py").casefold()))
    named = [trainer for trainer in TRAINERS if trainer != "trainer" and set(trainer.split("-")) <= line]
    return max(named, key=len) if named else ""
