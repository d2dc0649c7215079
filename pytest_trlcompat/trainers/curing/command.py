"""``trlcompat cures``: what each cure of a trainer does on the stack that is installed here."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import IO, Any

from pytest_trlcompat.trainers.curing.cure import CureStatus
from pytest_trlcompat.trainers.curing.errors import installed_version
from pytest_trlcompat.trainers.curing.kinds import TRAINERS

__all__ = ["UnknownTrainerError", "main", "trainer_named"]

_NAMES = ("trainer", "grpo", "ppo")
"""Kinds that are called by their name; of the others the class says which it is."""

SHOWN, UNUSABLE = 0, 2
"""Exit statuses: the cures were listed; the trainer cannot be had."""

_STACK = ("trl", "transformers", "torch", "accelerate", "deepspeed", "peft")
_WORDS = {True: "yes", False: "no", None: "depends"}
_STYLES = {True: "green", False: "dim", None: "yellow"}
_WIDTH = 120
_HEADS = ("cure", "active", "because", "known issues", "upstream")

_EPILOG = """\
examples:
  trlcompat cures                        trl.GRPOTrainer, as pytest_trlcompat.trainers.GRPOTrainer cures it
  trlcompat cures ppo                    TRL's PPO trainer, wherever the installed release keeps it
  trlcompat cures trainer                any other transformers.Trainer
  trlcompat cures trl:DPOTrainer         this one; a class of your own likewise: package.module:Class

active: yes, this stack needs the cure; no, it changes nothing; depends, on strategy, model or arguments: `cures` of a
trainer that was built, and a line in its log when training begins with log_level="info", say what holds for it
"""


class UnknownTrainerError(ValueError):
    """The trainer that was asked for cannot be had here; the message says why, and what to do."""


def main(arguments: Sequence[str]) -> int:
    """List the cures, and return the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        with redirect_stdout(sys.stderr):  # DeepSpeed logs there when it is imported
            trainer = trainer_named(parsed.trainer)
            cures = _cures(trainer)
    except UnknownTrainerError as error:
        print(f"trlcompat cures: {error}", file=sys.stderr)
        return UNUSABLE
    if parsed.json:
        print(json.dumps(_to_dict(trainer, cures), indent=1))
    else:
        _show(trainer, cures, sys.stdout)
    return SHOWN


def trainer_named(name: str) -> type:
    """The class of a trainer: ``grpo``, ``ppo``, ``trainer``, or ``package.module:Class``.

    Raises:
        UnknownTrainerError: it is unknown, not installed, or no subclass of ``transformers.Trainer``.
    """
    if name not in _NAMES and ":" not in name:
        raise UnknownTrainerError(
            f"unknown trainer {name!r}: give one of {', '.join(_NAMES)}, or package.module:Class, such as "
            "trl:DPOTrainer"
        )
    try:
        trainer = _of_kind(name) if name in _NAMES else _named(name)
        from transformers import Trainer
    except ImportError as error:
        raise UnknownTrainerError(_not_there(name, error)) from error
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise UnknownTrainerError(f"{name} is no subclass of transformers.Trainer: there are no cures for it")
    return trainer


def _of_kind(name: str) -> Any:
    if name == "ppo":
        from pytest_trlcompat.trainers.curing.trl_ppo import ppo_trainer_class

        return ppo_trainer_class()
    module, attribute = {"grpo": ("trl", "GRPOTrainer"), "trainer": ("transformers", "Trainer")}[name]
    return _named(f"{module}:{attribute}")


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UnknownTrainerError(f"{name!r} is no package.module:Class, such as trl:DPOTrainer")
    namespace = import_module(module)
    if not hasattr(namespace, attribute):
        version = installed_version(module.partition(".")[0])
        raise UnknownTrainerError(f"{module}{f' {version}' if version else ''} has no {attribute}")
    return getattr(namespace, attribute)


def _not_there(name: str, error: ImportError) -> str:
    package = name.partition(":")[0].partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and error.name in ("trl", "transformers", package):
        return (
            f"{error.name} is not installed in {sys.prefix}; run this with the Python of your training environment: "
            "python -m pytest_trlcompat cures"
        )
    return f"{name} cannot be imported: {error}"


def _cures(trainer: type) -> tuple[CureStatus, ...]:
    from pytest_trlcompat.trainers.curing.compose import cured

    try:
        curing: Any = cured(trainer)
    except TypeError as error:
        raise UnknownTrainerError(str(error)) from error
    cures: tuple[CureStatus, ...] = curing.cures
    return cures


def _stack() -> dict[str, str]:
    versions = ((package, installed_version(package)) for package in _STACK)
    return {package: version for package, version in versions if version}


def _to_dict(trainer: type, cures: Sequence[CureStatus]) -> dict[str, Any]:
    from pytest_trlcompat.trainers.curing.compose import kind_of

    return {
        "schema": 1,
        "trainer": f"{trainer.__module__}:{trainer.__qualname__}",
        "kind": kind_of(trainer),
        "trainers": _trainers_of(trainer),
        "stack": _stack(),
        "cures": [
            {
                "name": cure.name,
                "active": cure.active,
                "reason": cure.reason,
                "issues": list(cure.issues),
                "upstream": list(cure.upstream),
            }
            for cure in cures
        ],
    }


def _trainers_of(trainer: type) -> list[str]:
    """Which of TRL's trainers it is, as :data:`~pytest_trlcompat.trainers.curing.kinds.TRAINERS` calls them."""
    # TRL called it PPOv2Trainer before 0.12.
    names = {base.__name__.replace("PPOv2Trainer", "PPOTrainer") for base in trainer.__mro__}
    return [name for name, cls in TRAINERS.items() if cls in names]


def _show(trainer: type, cures: Sequence[CureStatus], file: IO[str]) -> None:
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if file.isatty() else _WIDTH
    stack = ", ".join(f"{package} {version}" for package, version in _stack().items())
    file.write(f"{trainer.__module__}.{trainer.__qualname__} with {stack}\n\n")
    try:
        from rich.console import Console
        from rich.table import Column, Table
    except ImportError:
        file.write("".join(f"{line}\n" for line in _plain(cures, width)))
        return
    table = Table(*(Column(head, no_wrap=head != "because") for head in _HEADS), box=None, pad_edge=False)
    for cure in cures:
        links = "\n".join(map(_short, cure.upstream))
        row = (cure.name, _WORDS[cure.active], cure.reason, "\n".join(cure.issues), links)
        table.add_row(*row, style=_STYLES[cure.active])
    Console(file=file, width=max(width, 80), highlight=False, markup=False).print(table)


def _plain(cures: Sequence[CureStatus], width: int) -> Iterator[str]:
    """Without rich: a paragraph for each cure."""
    for cure in cures:
        yield f"{cure.name}: {_WORDS[cure.active]}"
        for text in (cure.reason, *cure.issues, *map(_short, cure.upstream)):
            yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")


def _short(link: str) -> str:
    """``trl/issues/3683`` of a link to GitHub, which says enough in a table; ``--json`` has the whole of it."""
    return link.removeprefix("https://github.com/").partition("/")[2] or link


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trlcompat cures",
        description="Lists what each cure of a trainer does on the installed stack, and why. Trains nothing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "trainer",
        nargs="?",
        default="grpo",
        metavar="TRAINER",
        help=f"{', '.join(_NAMES)}, or package.module:Class; grpo by default",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, with whole links")
    return parser
