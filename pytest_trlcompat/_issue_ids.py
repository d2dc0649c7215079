"""The names of trainers, and what the id of a known issue says of its trainer."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MEASURED", "TRAINERS", "folder_of", "kind_of", "measured_with", "trainer_of"]

MEASURED = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("conformance/*/rows.toml")))
"""Trainers that have a folder in ``conformance``: those with a conformance suite, and issues of their own."""

_FIRST = "first-"

TRAINERS = tuple(name for name in MEASURED if not name.startswith(_FIRST.replace("-", "_")))
"""Trainers with issues of their own, whose ids begin with the name, or have it after ``conformance``.

Where another trainer had the same name before, the ids of its issues begin with ``first-``: ``first-rloo-eos-count``.
"""


def trainer_of(issue_id: str) -> str:
    """One of :data:`TRAINERS`, or empty for an issue that meets every trainer."""
    prefix = issue_id.removeprefix("conformance-").removeprefix(_FIRST).partition("-")[0]
    return prefix if prefix in TRAINERS else ""


def measured_with(issue_id: str) -> str:
    """The trainer that an issue's suite runs: ``trainer`` is Transformers' own, and ``first_rloo`` the legacy RLOO,
    which had the name before ``rloo``."""
    if issue_id.startswith("trainer-"):
        return "trainer"
    is_first = issue_id.removeprefix("conformance-").startswith(_FIRST)
    return ("first_" if is_first else "") + (trainer_of(issue_id) or "grpo")


def kind_of(issue_id: str) -> str:
    """The trainer whose cures cure it, as :func:`measured_with` names it; empty for one that meets every trainer."""
    return measured_with(issue_id) if trainer_of(issue_id) else ""


def folder_of(issue_id: str) -> str:
    """The folder of the catalogue in which an issue's file lies: its trainer, or the area that its id begins with."""
    if issue_id.startswith("conformance-"):
        return "conformance"
    return kind_of(issue_id) or issue_id.partition("-")[0]
