"""Train briefly on the rows of a dataset with a setting, and record everything that the reference computes too.

:func:`recorded` records a training whose trainer another program builds, such as a project's own command.

Runs inside a rank.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.supervised.evaluating import AFTER
from pytest_trlcompat.conformance.supervised.hooks import SupervisedHooks
from pytest_trlcompat.conformance.supervised.records import MicroBatchRecord, Recording
from pytest_trlcompat.conformance.training import Whole, trained_weights, watched_steps

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["record", "recorded"]


def record(
    adapter: SupervisedHooks,
    trainer_class: type,
    model: TinyModel,
    setting: Mapping[str, Any],
    seed: int = 0,
    whole: Whole | None = None,
) -> Recording:
    """Train, and evaluate and resume where the setting says so.

    Args:
        trainer_class: the adapter's trainer, or a subclass of it.
        setting: fields of the config, and values of axes.
        seed: of the data.
        whole: gathers the trained weights of a trainer, by their names in the bare model, where a strategy shards
            them; then no gradients are recorded. Called on every rank.
    """
    import trl

    setting = adapter.known_part(trl, setting)
    config = adapter.config(trl, setting)
    recording = Recording()
    # A trainer has to leave the dictionaries as they are that a user has given it.
    dictionaries = copy.deepcopy({name: value for name, value in vars(config).items() if isinstance(value, dict)})
    with adapter.surrounding(model, setting, config, seed, recording):
        trainer = _build(adapter, trainer_class, model, setting, config, seed, recording)
        recording.changed = {
            name: (value, vars(config)[name]) for name, value in dictionaries.items() if vars(config)[name] != value
        }
        if setting.get("evaluation") == "before":
            trainer.evaluate()
        with _recorded_steps(trainer, recording, whole):
            trainer.train()
        if setting.get("evaluation") == "best":
            recording.final = (whole or trained_weights)(trainer)
        if setting.get("evaluation") in AFTER:
            adapter.evaluate(trainer, model, setting, seed)
    if setting.get("resumed"):
        _resume(adapter, trainer_class, model, setting, config, seed, recording, whole)
    return recording


@contextlib.contextmanager
def recorded(
    adapter: SupervisedHooks, ended: Callable[[Recording], None], whole: Whole | None = None
) -> Iterator[None]:
    """Record the first training that begins within, whoever builds its trainer, such as a project's own command.

    Args:
        adapter: how the trainer's batches are read.
        ended: called with the recording as soon as the training has ended: the program around it may destroy the
            process group before it ends itself.
        whole: as of :func:`record`.
    """
    import transformers

    recording, plain = Recording(), transformers.Trainer.train

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        transformers.Trainer.train = plain
        self.__class__ = _recorded_class(type(self), adapter, recording)
        _describe(self, recording)
        with _recorded_steps(self, recording, whole):
            returned = plain(self, *args, **kwargs)
        ended(recording)
        return returned

    transformers.Trainer.train = train
    try:
        yield
    finally:
        transformers.Trainer.train = plain


def _build(
    adapter: SupervisedHooks,
    trainer_class: type,
    model: TinyModel,
    setting: Mapping[str, Any],
    config: Any,
    seed: int,
    recording: Recording,
) -> Any:
    import transformers

    trainer = adapter.build(_recorded_class(trainer_class, adapter, recording), model, setting, config, seed, True)
    trainer.remove_callback(transformers.PrinterCallback)
    _describe(trainer, recording)
    return trainer


def _describe(trainer: Any, recording: Recording) -> None:
    recording.fingerprints = list(getattr(trainer, "fingerprints", []))
    plain = (int, float, str, bool, list, tuple, dict, type(None))
    recording.arguments |= {name: value for name, value in vars(trainer.args).items() if isinstance(value, plain)}
    for part, dataset in (("training", trainer.train_dataset), ("evaluation", trainer.eval_dataset)):
        if isinstance(dataset, Sized) and not isinstance(dataset, dict):
            recording.sizes[part] = len(dataset)


@contextlib.contextmanager
def _recorded_steps(trainer: Any, recording: Recording, whole: Whole | None) -> Iterator[None]:
    with watched_steps(trainer, recording, whole):
        yield
    recording.logs = [dict(entry) for entry in trainer.state.log_history if "loss" in entry]


def _recorded_class(trainer_class: type, adapter: SupervisedHooks, recording: Recording) -> type:
    """A subclass of the trainer that records what its methods are given and return."""

    watched: Any = adapter.watched(trainer_class, recording)

    class Recording(watched):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # In an evaluation prediction_step has recorded the batch.
            if not recording.in_evaluation:
                self._trlcompat_keep(inputs, None)
            return super().compute_loss(model, inputs, *args, **kwargs)

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._trlcompat_keep(self._prepare_inputs(inputs), len(recording.evaluations))
            return super().prediction_step(model, inputs, *args, **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            """An evaluation of several sets calls itself for each; only these inner calls are recorded."""
            before, prefix = len(recording.evaluations), kwargs.get("metric_key_prefix", "eval")
            recording.in_evaluation = True
            try:
                logs = super().evaluate(*args, **kwargs)
            finally:
                recording.in_evaluation = False
            if len(recording.evaluations) > before:
                return logs
            dataset = args[0] if args else kwargs.get("eval_dataset")
            sets = [*dataset] if isinstance(dataset, dict) else []
            logged = [entry for entry in self.state.log_history if f"{prefix}_loss" in entry]
            recording.evaluations.append((len(recording.steps), _as_one(logged[-1] if logged else logs, prefix, sets)))
            recording.returned.append(_as_one(logs, prefix, sets))
            return logs

        def _trlcompat_keep(self, inputs: Any, evaluation: int | None) -> None:
            read = adapter.read(inputs, vars(self.args))
            recording.micro_batches.append(MicroBatchRecord(read.rows, read.problems, read.values, evaluation))

    Recording.__name__ = trainer_class.__name__
    return Recording


def _as_one(entry: Mapping[str, Any], prefix: str, sets: Sequence[str]) -> dict[str, Any]:
    """What is logged of one of several sets, under the names that a single set has.

    Args:
        sets: names of those that one call evaluates together. They are equally large, so that the loss is the mean.
    """
    losses = [entry[name] for set_name in sets if (name := f"{prefix}_{set_name}_loss") in entry]
    if losses and len(losses) == len(sets):
        entry = {f"{prefix}_loss": sum(losses) / len(losses), **entry}
    return {
        f"eval_{name.removeprefix(f'{prefix}_')}" if name.startswith(f"{prefix}_") else name: value
        for name, value in entry.items()
    }


def _resume(
    adapter: SupervisedHooks,
    trainer_class: type,
    model: TinyModel,
    setting: Mapping[str, Any],
    config: Any,
    seed: int,
    recording: Recording,
    whole: Whole | None,
) -> None:
    """Resume from the checkpoint of the first step; the resumed steps replace those that were recorded after it."""
    steps = 1
    again = Recording(arguments=recording.arguments)
    with adapter.surrounding(model, setting, config, seed, again):
        trainer = _build(adapter, trainer_class, model, setting, config, seed, again)
        with _recorded_steps(trainer, again, whole):
            trainer.train(resume_from_checkpoint=os.path.join(config.output_dir, f"checkpoint-{steps}"))
    trained_before = recording.steps[steps - 1].micro_batches
    for step in again.steps:
        step.micro_batches += trained_before
    recording.before_resuming = [batch.rows for batch in recording.training[trained_before:]]
    recording.after_resuming = [batch.rows for batch in again.training]
    recording.micro_batches = recording.training[:trained_before] + again.training
    recording.steps = recording.steps[:steps] + again.steps
    recording.logs = again.logs
