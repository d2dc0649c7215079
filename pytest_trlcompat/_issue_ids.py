"""The names of trainers, and what the id of a known issue says of its trainer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["CLASSES", "TRAINERS", "folder_of", "kind_of", "measured_with", "trainer_of"]

_NAMED: Mapping[str, tuple[str, bool]] = {
    "grpo": ("GRPOTrainer", True),
    "ppo": ("PPOTrainer", True),
    "sft": ("SFTTrainer", True),
    "dpo": ("DPOTrainer", True),
    "reward": ("RewardTrainer", True),
    "rloo": ("RLOOTrainer", True),
    "kto": ("KTOTrainer", True),
    "orpo": ("ORPOTrainer", False),
    "cpo": ("CPOTrainer", False),
    "bco": ("BCOTrainer", False),
    "prm": ("PRMTrainer", False),
    "gkd": ("GKDTrainer", False),
    "distillation": ("DistillationTrainer", True),
    "online-dpo": ("OnlineDPOTrainer", False),
    "nash-md": ("NashMDTrainer", False),
    "xpo": ("XPOTrainer", False),
    "trainer": ("YourTrainer", False),
}
"""What people call a trainer: the name of TRL's class, and whether it has issues of its own."""

CLASSES: Mapping[str, str] = MappingProxyType({name: class_name for name, (class_name, _) in _NAMED.items()})
"""What people call a trainer to the name of TRL's class; ``trainer`` is any other, also a user's own."""

TRAINERS = tuple(sorted(name for name, (_, has_issues) in _NAMED.items() if has_issues))
"""Trainers with issues of their own, whose ids begin with the name, or have it after ``conformance``.

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
