"""Read the trainer of a known issue from its id."""

from __future__ import annotations

__all__ = ["TRAINERS", "folder_of", "kind_of", "measured_with", "trainer_of"]

TRAINERS = ("distillation", "dpo", "grpo", "kto", "ppo", "reward", "rloo", "sft")
"""Trainers whose names begin the ids of their issues, or follow ``conformance-``.

Where another trainer had the same name before, the ids of its issues begin with ``first-``: ``first-rloo-eos-count``.
"""

_FIRST = "first-"


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
