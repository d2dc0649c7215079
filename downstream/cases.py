"""What is trained by a project's own program and held against the reference, and which differences are known.

``docs/contributing/downstream.md`` has its table from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

__all__ = ["Case", "Differs", "marked", "table"]


@dataclass(frozen=True)
class Differs:
    """
    Attributes:
        what: in words.
        stages: a pattern of the stages that differ.
        why: the project's purpose, or what is wrong.
    """

    what: str
    stages: str
    why: str

    def is_stage(self, stage: str) -> bool:
        return re.fullmatch(self.stages, stage) is not None


@dataclass(frozen=True)
class Case:
    """A training to be held.

    Attributes:
        settings: of the project's command, beside those that each of its trainings has.
        known: all that differs.
        strategy: ``single`` or ``ddp``, with two ranks.
        undecided: how the project does what documentation leaves open, where not as its release of TRL does.
    """

    name: str
    settings: Mapping[str, Any]
    known: tuple[Differs, ...] = ()
    strategy: str = "single"
    undecided: Mapping[str, Any] = field(default_factory=dict)


def marked(cases: Sequence[Case]) -> Any:
    """Parametrises a test by cases."""
    return pytest.mark.parametrize("case", [pytest.param(each, id=each.name) for each in cases])


def table(trainings: Mapping[str, Sequence[Case]]) -> str:
    """A table in Markdown.

    Args:
        trainings: project and trainer to what is trained.
    """
    rows = [line for name, cases in trainings.items() for line in _rows(name, cases)]
    return "\n".join(["| trainer | trainings | what differs | why |", "| --- | --- | --- | --- |", *rows])


def _rows(name: str, cases: Sequence[Case]) -> Iterator[str]:
    """Of a trainer: the trainings without a difference first, then by what differs."""
    groups: dict[Differs | None, list[str]] = {}
    for case in cases:
        for differs in case.known or (None,):
            groups.setdefault(differs, []).append(case.name)
    for found, names in sorted(groups.items(), key=lambda each: each[0] is not None):
        what, why = (found.what, found.why) if found else ("nothing", "")
        yield f"| {name} | {', '.join(f'`{each}`' for each in names)} | {what} | {why} |"
