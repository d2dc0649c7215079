"""The records of the table of config fields: fields that are tried, their values, and groups of those that are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement

__all__ = [
    "ANY",
    "EFFECTS",
    "KINDS",
    "NEEDS",
    "Choice",
    "FieldsError",
    "Group",
    "Placement",
    "Tried",
    "may_stand_together",
    "same",
]

KINDS = ("try", "no_effect", "untestable", "launch")
"""The places that a field can have in the table."""
ANY = "any"
"""In ``never_with``: any value but the default."""

EFFECTS: Mapping[str, str] = {
    "reference": "what a step gives changes as `pytest_trlcompat.reference` computes it, given the same setting",
    "unmodelled": "what a step gives changes as documented, and the reference does not compute it: what comes before "
    "must agree, and the training must end",
    "inputs": "which rows, models or how many steps there are; with the same inputs, a step gives the same",
    "sampling": "which completions are sampled; with the same completions, a step gives the same",
    "precision": "how numbers are rounded",
    "logs": "when something is logged, or that more is; what is logged of a step is the same",
    "evaluation": "when there is an evaluation, and what it gives; steps are the same",
    "saving": "when there is a checkpoint, what it holds, and which is loaded at the end; steps are the same",
    "resuming": "what a resumed run does",
    "none": "nothing",
}
"""What may differ from a run without the setting, by the word in the table."""

NEEDS: Mapping[str, str] = {
    "adapter": "the model has an adapter",
    "compiling": "far more time than other trainings, and for `inductor` a C++ compiler",
    "conversational": "prompts are conversations",
    "dropout": "the model has dropout",
    "evaluate": "an evaluation outside of a training",
    "length_column": "the data has a column `rows`, of numbers",
    "main_module": "a new process can import the main module of the rank, which must not train again",
    "model_name": "the trainer is given the model's name, and loads it",
    "moe": "the model is a mixture of experts",
    "ranks": "more than one rank",
    "resume": "a run that is resumed from a checkpoint",
    "tools": "the trainer is given tools",
    "two_adapters": "the model has two adapters, the second of which is called `reference`",
    "two_rewards": "two reward functions",
    "untied": "the model's embeddings and its head are not tied",
    "vision": "prompts have images",
    "zero3": "the strategy zero3",
}
"""What a value needs to have an effect and no argument can give, by the word in the table."""


class FieldsError(ValueError):
    """The table, or a question to it, is wrong; the text says where."""


@dataclass(frozen=True)
class Choice:
    """A value to try.

    Attributes:
        with_: settings without which it has no effect or is refused, including those of its field.
        never_with: settings with which it must not be tried: values, or ``None`` for any but the default.
        releases: releases of a package whose documentation names the value.
        given_as: what the reference calls the value.
    """

    value: Any
    with_: Mapping[str, Any]
    never_with: Mapping[str, Sequence[Any] | None]
    releases: Requirement | None
    given_as: Any

    def holds_for(self, versions: Mapping[str, str]) -> bool:
        """Whether these versions, by package, document the value.

        Raises:
            FieldsError: for versions without that of the package in question.
        """
        if self.releases is None:
            return True
        if self.releases.name not in versions:
            raise FieldsError(
                f"whether {self.value!r} is documented depends on {self.releases}, whose version is missing"
            )
        return self.releases.specifier.contains(versions[self.releases.name], prereleases=True)

    def excludes(self, other: str, value: Any) -> bool:
        """Whether it must not be tried with ``other=value``, which is not the default."""
        if other in self.with_ and not same(self.with_[other], value):
            return True
        if other not in self.never_with:
            return False
        values = self.never_with[other]
        return values is None or any(same(value, excluded) for excluded in values)

    def settings(self, name: str) -> dict[str, Any]:
        """All that has to be set to try it as the value of ``name``."""
        return {**self.with_, name: self.value}


@dataclass(frozen=True)
class Tried:
    """A field that is tried.

    Attributes:
        name: the newest name.
        choices: the values, each with all of its conditions.
        with_, never_with: the conditions that all values have in common.
        effect: one of :data:`EFFECTS`.
        names: of the argument in all releases, the newest first.
        needs: of :data:`NEEDS`.
        reference: the setting of ``pytest_trlcompat.reference`` that is the same; empty unless ``effect`` is
            ``"reference"``.
        left_out: documented values that are not tried, and why; may be empty.
        title: of its group.
    """

    name: str
    choices: tuple[Choice, ...]
    with_: Mapping[str, Any]
    never_with: Mapping[str, Sequence[Any] | None]
    effect: str
    names: tuple[str, ...]
    needs: tuple[str, ...]
    reference: str
    left_out: str
    title: str

    @property
    def values(self) -> tuple[Any, ...]:
        """The values that are tried in addition to the default, which may be one of them in some releases."""
        return tuple(choice.value for choice in self.choices)

    def name_in(self, installed: Collection[str]) -> str | None:
        """The name of the argument in an installed config class; ``None`` where it has no such argument."""
        return next((name for name in self.names if name in installed), None)


@dataclass(frozen=True)
class Group:
    """Fields that are not tried for the same reason; ``kind`` is one of :data:`KINDS` but the first."""

    kind: str
    fields: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Placement:
    """The place of a field: ``where`` is the title or the reason of its group."""

    kind: str
    where: str


def may_stand_together(field: str, choice: Choice, other_field: str, other_choice: Choice) -> bool:
    """Whether one training can try ``choice`` of ``field`` together with ``other_choice`` of ``other_field``."""
    return not (
        any(choice.excludes(name, value) for name, value in other_choice.settings(other_field).items())
        or any(other_choice.excludes(name, value) for name, value in choice.settings(field).items())
    )


def same(value: Any, other: Any) -> bool:
    """Whether values are equal; 1 and True are not."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
