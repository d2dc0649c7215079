"""Plant faults into a trainer of TRL's, one at a time, and look for them with rows of the conformance suite.

``nox -s bench -- conformance_faults [--trainer sft] [--all-rows] [NUMBER ...]``, in the environment of the newest cell.
Nothing on disk is changed: each fault is planted in a process of its own, into the module's source before it runs. A
fault is found where a row has a difference, or an exception, that it does not have without the fault. It is found where
it is if the first such difference is named as was written down before; an exception says where it comes from by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_trlcompat.conformance import driver, rows  # noqa: E402
from pytest_trlcompat.conformance.training import conformance_model  # noqa: E402
from pytest_trlcompat.trainers.curing.kinds import TRAINERS as NAMES  # noqa: E402
from suites.in_rank.models import save_model  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAULTS = Path(__file__).with_suffix("")
TRAINERS = tuple(sorted(path.stem for path in FAULTS.glob("*.toml")))
"""Those that there are faults for."""


@dataclass(frozen=True)
class Fault:
    """
    Attributes:
        old, new: text of the trainer's source, and what replaces it wherever it stands.
        row: a setting that shows it.
        stages: how names of stages begin that the first difference may have.
    """

    old: str
    new: str
    row: str
    stages: Sequence[str]

    def plant(self, source: str) -> str:
        """
        Raises:
            SystemExit: when the text to replace does not occur.
        """
        if self.old not in source:
            raise SystemExit(f"this release of trl has nowhere: {self.old!r}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Shown:
    """What a row shows: the stages that differ, in their order, or the exception."""

    stages: Sequence[str] = ()
    failure: str = ""


def read_faults(trainer: str) -> tuple[str, list[Fault]]:
    """The release of TRL that they are for, and the faults."""
    with open(FAULTS / f"{trainer}.toml", "rb") as file:
        raw = tomllib.load(file)
    return raw["release"], [Fault(**entry) for entry in raw["fault"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="of faults; all by default")
    parser.add_argument("--trainer", choices=TRAINERS, default="grpo", help="whose faults; those of grpo by default")
    parser.add_argument("--all-rows", action="store_true", help="try the rows in their order, not the known one first")
    options = parser.parse_args()
    import torch
    import trl

    release, faults = read_faults(options.trainer)
    if trl.__version__ != release:
        print(f"the faults are for trl {release}, and this is {trl.__version__}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # threads of this process would be lost in those that it forks
    chosen = options.numbers or range(len(faults))
    with tempfile.TemporaryDirectory() as folder:
        model = conformance_model(folder)
        save_model(model)

        @cache
        def sound(name: str) -> Shown:
            return _alone(_train, options.trainer, model, name)

        results = [_look(options.trainer, number, faults[number], model, sound, options.all_rows) for number in chosen]
    there, raised = results.count("there"), results.count("raised")
    print(f"{sum(map(bool, results))} of {len(results)} faults found, {there} where they are, {raised} by an exception")
    return 0 if all(results) else 1


def _look(trainer: str, number: int, fault: Fault, model: Any, sound: Callable[[str], Shown], in_order: bool) -> str:
    """Empty for a survivor; ``there``, ``raised`` or ``elsewhere``."""
    names = [
        name for name, row in _rows(trainer).items() if row.strategy == "single" and row.setting.get("refused") is None
    ]
    if not in_order:
        names.sort(key=lambda name: name != fault.row)
    for name in names:
        shown = _alone(_train, trainer, model, name, fault)
        if shown.failure and not sound(name).failure:
            return _said(number, name, "raised", shown.failure.splitlines()[0])
        first = next((stage for stage in shown.stages if stage not in sound(name).stages), None)
        if first is not None:
            return _said(number, name, "there" if first.startswith(tuple(fault.stages)) else "elsewhere", first)
    return _said(number, "no row", "", "SURVIVED")


def _said(number: int, row: str, answer: str, what: str) -> str:
    print(f"{number:3} {row}: {what}{' (another stage)' if answer == 'elsewhere' else ''}", flush=True)
    return answer


@cache
def _rows(trainer: str) -> Mapping[str, rows.Row]:
    return {row.name: row for row in rows.load(trainer).values()}


def _alone(function: Callable[..., Shown], *arguments: Any) -> Shown:
    """Call it in a process of its own, which has all that is imported here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as processes:
        return processes.submit(function, *arguments).result()


def _train(trainer: str, model: Any, name: str, fault: Fault | None = None) -> Shown:
    import trl

    if fault is not None:
        called = trainer.removeprefix("first_")
        module = import_module(f"trl.trainer.{called}_trainer")
        path = str(module.__file__)
        planted = compile(fault.plant(Path(path).read_text(encoding="utf-8")), path, "exec")
        exec(planted, vars(module))  # noqa: S102 - the installed module, with one fault
        setattr(trl, NAMES[called], getattr(module, NAMES[called]))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        found = driver.compare_with_reference(trainer, "upstream", model, {name: _rows(trainer)[name].setting})[name]
    return Shown(tuple(dict.fromkeys(each["stage"] for each in found["differences"])), found["failure"] or "")


if __name__ == "__main__":
    sys.exit(main())
