"""How a trainer is built from its arguments, and on what it evaluates: axes of adapters that read a user's data.

Runs inside a rank.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["AFTER", "EVALUATION", "GIVEN", "SINCE", "built", "evaluate", "evaluation_argument"]

GIVEN = ("", "no_train_dataset", "peft_mapping", "twice", "no_arguments")
"""``peft_mapping``: a mapping for ``peft_config``, which documentation does not allow; ``twice``: another trainer is
built first, with other values of arguments on which no row depends, and the data prepared for it must be used again;
``no_arguments``: another one is built first without ``args``, which signatures allow."""
EVALUATION = ("", "after", "before", "during", "best", "given", "sets", "streamed", "sets_streamed", "given_sets")
"""``given``: ``evaluate()`` is given the data after the training, and the trainer has none; ``sets``: the trainer has a
dictionary of two sets; ``streamed``: they are an ``IterableDataset``; ``sets_streamed``: in a dictionary;
``given_sets``: ``evaluate()`` is given a dictionary of two sets."""
AFTER = ("after", "given", "sets", "streamed", "sets_streamed", "given_sets")
"""The kinds that evaluate once, when the training has ended."""
SINCE: Mapping[tuple[str, Any], str] = {
    **{("evaluation", kind): "trl>=0.12" for kind in AFTER if kind != "after"},
    **{("given", kind): "trl>=0.12" for kind in GIVEN if kind},
    ("given", "twice"): "trl>=1.7",
    # Before, evaluate() does not prepare the data that it is given.
    ("evaluation", "given_sets"): "trl>=1.7",
    ("metrics", True): "trl>=0.12",
}
"""The releases with which these values were measured, as requirements."""
_PRECISION = "ACCELERATE_MIXED_PRECISION"


def built(trainer_class: type, arguments: Mapping[str, Any], setting: Mapping[str, Any]) -> Any:
    """The trainer, with its arguments as the axis ``given`` changes them.

    One that is built twice has ``fingerprints``, those of both prepared training sets, which are the keys in the cache
    of ``datasets``.

    Args:
        arguments: without the change.
    """
    kind = setting.get("given")
    if kind == "no_train_dataset":
        arguments = {**arguments, "train_dataset": None}
    elif kind == "peft_mapping":
        arguments = {**arguments, "peft_config": {"r": 4}}
    if kind == "no_arguments":
        _of_defaults(trainer_class, {name: value for name, value in arguments.items() if name != "args"})
    before = trainer_class(**{**arguments, "args": _elsewhere(arguments["args"])}) if kind == "twice" else None
    trainer = trainer_class(**arguments)
    if before is not None:
        trainer.fingerprints = [prepared.train_dataset._fingerprint for prepared in (before, trainer)]
    return trainer


def _elsewhere(args: Any) -> Any:
    """The arguments with changes on which prepared rows do not depend: the folder to save in, ``beta`` and, where
    nothing is cut, ``padding_free``."""
    changed = copy.copy(args)
    changed.output_dir = tempfile.mkdtemp(prefix="trlcompat-")
    if hasattr(args, "beta"):
        changed.beta = args.beta / 2
    if hasattr(args, "padding_free") and getattr(args, "max_length", 0) is None:
        changed.padding_free = True
    return changed


def _of_defaults(trainer_class: type, arguments: Mapping[str, Any]) -> None:
    """Build a trainer without ``args``. Its defaults ask for bfloat16, which a device may rightly refuse."""
    try:
        with _precision_and_folder_of_its_own():
            trainer_class(**arguments)
    except ValueError as error:
        if "bf16" not in str(error):
            raise


@contextlib.contextmanager
def _precision_and_folder_of_its_own() -> Iterator[None]:
    """Undo what a trainer with default arguments changes for the whole process.

    That is the precision, which Accelerate and its variable keep, and the folder that the trainer makes in the working
    directory.
    """
    from accelerate.state import AcceleratorState

    before, place = os.environ.get(_PRECISION), Path.cwd()
    AcceleratorState._reset_state()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(place)
            AcceleratorState._reset_state()
            os.environ.pop(_PRECISION, None)
            if before is not None:
                os.environ[_PRECISION] = before


def evaluate(trainer: Any, setting: Mapping[str, Any], dataset: Callable[[], Any]) -> None:
    """Evaluate after a training, on the trainer's data, or on data that is passed now.

    Args:
        dataset: makes the rows of the evaluation.
    """
    kind = setting.get("evaluation")
    if kind == "given_sets":
        trainer.evaluate(_named([dataset(), dataset()]))
    else:
        trainer.evaluate(*[dataset()] if kind == "given" else [])


def evaluation_argument(setting: Mapping[str, Any], dataset: Callable[[], Any]) -> dict[str, Any]:
    """The argument ``eval_dataset`` of a trainer, or nothing.

    Args:
        dataset: makes the rows of the evaluation.
    """
    kind = str(setting.get("evaluation") or "")
    if kind in ("", "given", "given_sets"):
        return {}
    datasets = [dataset() for _ in range(2 if kind.startswith("sets") else 1)]
    if kind.endswith("streamed"):
        datasets = [rows.to_iterable_dataset() for rows in datasets]
    return {"eval_dataset": _named(datasets) if len(datasets) > 1 else datasets[0]}


def _named(datasets: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("first", "second"), datasets, strict=True))
