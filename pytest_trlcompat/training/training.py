"""A training as plain data: values of named axes, which are read from files, commands or objects.

Imports the standard library alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_trlcompat.training.aliases import names_of
from pytest_trlcompat.training.axes import AXES, PARTS, TRAINERS, axis_named
from pytest_trlcompat.training.errors import TrainingError
from pytest_trlcompat.training.reading import live

__all__ = ["DEFAULT", "SCHEMA", "UNKNOWN", "Training", "TrainingError", "full_name", "joined"]

SCHEMA = 1
"""Of :meth:`Training.to_dict`; it changes where a reader of an older one would be wrong."""


_SECRET = re.compile(r"hub_token$|api_key|password|secret|credential", re.IGNORECASE)
"""What is never kept of a training: ``hub_token`` of a config, and what projects add of the kind."""
_HIDDEN = "hidden"


class _Marker:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


UNKNOWN = _Marker("unknown")
"""The value of an axis about which nothing is known."""
DEFAULT = _Marker("default")
"""The value of an argument that was not given, so that it is the release's default."""


@dataclass(frozen=True)
class Training:
    """Values of the axes of :mod:`~pytest_trlcompat.training.axes`.

    Attributes:
        trainer: one of :data:`~pytest_trlcompat.training.axes.TRAINERS`; empty where it is not known.
        values: axis, ``part.name``, to a value as JSON has it. Of arguments the newest name:
            ``arguments.processing_class``. What is not there is not known.
        whole: whether arguments that are not among the values have their defaults, as where a file was read; of a part
            of them nothing is known otherwise.
        source: from where it was read, for people.
        notes: what could not be read, or was read as something else.
    """

    trainer: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.trainer and self.trainer not in TRAINERS:
            raise TrainingError(f"trainer {self.trainer!r} is not known; known are {', '.join(TRAINERS)}")
        named = {full_name(name): value for name, value in self.values.items()}
        if unknown := sorted(name for name in named if not _is_axis(name)):
            raise TrainingError(
                f"{', '.join(unknown)}: no axis of a training; the axes are arguments.NAME and {', '.join(AXES)}"
            )
        shown = {name: _HIDDEN if value and _SECRET.search(name) else value for name, value in named.items()}
        object.__setattr__(self, "values", dict(sorted(shown.items())))

    def value(self, axis: str) -> Any:
        """What an axis has: a value, :data:`DEFAULT`, or :data:`UNKNOWN`.

        Args:
            axis: ``part.name``, or the name of an argument, by any of its names.
        """
        name = full_name(axis)
        if name in self.values:
            return self.values[name]
        return DEFAULT if self.whole and name.startswith("arguments.") else UNKNOWN

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields of the config that are given, by their newest names."""
        return self.part("arguments")

    def part(self, part: str) -> dict[str, Any]:
        """The values of one of :data:`~pytest_trlcompat.training.axes.PARTS`, by names without it."""
        start = f"{part}."
        return {name[len(start) :]: value for name, value in self.values.items() if name.startswith(start)}

    def to_dict(self) -> dict[str, Any]:
        """As JSON: ``schema``, ``trainer``, ``source``, ``whole``, ``notes``, and an object for each part."""
        return {
            "schema": SCHEMA,
            "trainer": self.trainer,
            "source": self.source,
            "whole": self.whole,
            "notes": list(self.notes),
            **{part: self.part(part) for part in PARTS},
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Training:
        """The training that :meth:`to_dict` wrote.

        Raises:
            TrainingError: another schema, an unknown key, or an axis that there is not.
        """
        if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
            schema = document.get("schema") if isinstance(document, Mapping) else None
            raise TrainingError(f"a training of schema {SCHEMA} was expected, schema {schema!r} was found")
        known = {"schema", "trainer", "source", "whole", "notes", *PARTS}
        if unknown := sorted(set(document) - known):
            raise TrainingError(f"a training has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        parts = {part: document.get(part, {}) for part in PARTS}
        if odd := [part for part, held in parts.items() if not isinstance(held, Mapping)]:
            raise TrainingError(f"{', '.join(odd)} of a training must be an object of names and values")
        return cls(
            trainer=document.get("trainer", ""),
            values={f"{part}.{name}": value for part, held in parts.items() for name, value in held.items()},
            whole=bool(document.get("whole")),
            source=document.get("source", ""),
            notes=tuple(document.get("notes", ())),
        )

    def to_json(self) -> str:
        """:meth:`to_dict` as text; the same training gives the same text."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1, default=str)

    @classmethod
    def from_json(cls, text: str) -> Training:
        """
        Raises:
            TrainingError: no JSON, or as :meth:`from_dict`.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise TrainingError(f"a training as JSON was expected: {error}") from error
        return cls.from_dict(document)

    @classmethod
    def of(cls, trainer: Any) -> Training:
        """The training of a live trainer, as it is built; runs nothing and imports nothing that it has not.

        Raises:
            TrainingError: for what is no trainer.
        """
        name, values, notes = live.read_trainer(trainer)
        return cls(name, values, source=type(trainer).__name__, notes=notes)

    @classmethod
    def of_objects(cls, trainer: str, config: object, model: object = None, peft_config: object = None) -> Training:
        """The training that these would make.

        Args:
            trainer: one of :data:`~pytest_trlcompat.training.axes.TRAINERS`.
            config: a config of TRL's, or ``TrainingArguments``.
            model: a model as it is, its config, or a name; ``None`` where it is not known.
            peft_config: of an adapter that the trainer shall make.
        """
        values, notes = live.read_objects(config, model, peft_config)
        return cls(trainer, values, source=type(config).__name__, notes=notes)


def full_name(axis: str) -> str:
    """``arguments.eval_strategy`` of ``evaluation_strategy``; any other axis as it is."""
    part, dot, name = axis.partition(".")
    if not dot:
        part, name = "arguments", axis
    return f"{part}.{names_of(name)[0]}" if part == "arguments" else axis


def _is_axis(name: str) -> bool:
    return name.startswith("arguments.") or axis_named(name) is not None


def joined(trainings: Iterable[Training]) -> Training:
    """One training of what several sources say; the last that says something about an axis counts."""
    parts = list(trainings)
    values: dict[str, Any] = {}
    for training in parts:
        values.update(training.values)
    return Training(
        trainer=next((training.trainer for training in reversed(parts) if training.trainer), ""),
        values=values,
        whole=any(training.whole for training in parts),
        source=", ".join(dict.fromkeys(training.source for training in parts if training.source)),
        notes=tuple(dict.fromkeys(note for training in parts for note in training.notes)),
    )
