"""What the id of a known issue says of its trainer."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MEASURED", "TRAINERS", "folder_of", "kind_of", "measured_with", "trainer_of"]

MEASURED = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("conformance/*/rows.toml")))
"""Trainers that have a folder in ``conformance``: those with a conformance suite, and issues of their own."""

_FIRST = "first-"

TRAINERS = tuple(name for name in MEASURED if not name.startswith(_FIRST.replace("-", "_")))
"""Trainers that issues of their own begin with in their ids, or end with after ``conformance``.

Where another trainer had the same name before, ids of its issues have ``first-`` in front, ``first-rloo-eos-count``.
"""


def trainer_of(issue_id: str) -> str:
    """One of :data:`TRAINERS`, or empty for an issue that meets every trainer."""
    prefix = issue_id.removeprefix("conformance-").removeprefix(_FIRST).partition("-")[0]
    return prefix if prefix in TRAINERS else ""


def measured_with(issue_id: str) -> str:
    """The trainer that an issue's suite runs: ``trainer`` for a plain one of Transformers', and ``first_rloo`` for the
    trainer that had the name of ``rloo`` before."""
    if issue_id.startswith("trainer-"):
        return "trainer"
    is_first = issue_id.removeprefix("conformance-").startswith(_FIRST)
    return ("first_" if is_first else "") + (trainer_of(issue_id) or "grpo")


def kind_of(issue_id: str) -> str:
    """Whose cures cure it, as :func:`measured_with` names trainers; empty for one that meets every trainer."""
    return measured_with(issue_id) if trainer_of(issue_id) else ""


def folder_of(issue_id: str) -> str:
    """The folder of the catalogue in which an issue's file lies: its trainer, or the area that its id begins with."""
    if issue_id.startswith("conformance-"):
        return "conformance"
    return kind_of(issue_id) or issue_id.partition("-")[0]
