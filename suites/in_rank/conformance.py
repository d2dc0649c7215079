"""Trainings with settings, each held against the reference. Runs inside the ranks.

Imports the stack only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import comparison, liger
from pytest_trlcompat.conformance.distillation.room import ROOM as DISTILLATION
from pytest_trlcompat.conformance.dpo.room import ROOM as DPO
from pytest_trlcompat.conformance.grpo.methods import RLOO
from pytest_trlcompat.conformance.kto.room import ROOM as KTO
from pytest_trlcompat.conformance.reward.room import ROOM as REWARD
from pytest_trlcompat.conformance.sft.room import ROOM as SFT

from . import grpo_conformance, in_step, on_policy_conformance, supervised_conformance

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["hold"]

_HELD: Mapping[str, Callable[[str, TinyModel, Mapping[str, Any], int, bool], dict[str, Any]]] = {
    "distillation": partial(supervised_conformance.held, DISTILLATION),
    "dpo": partial(supervised_conformance.held, DPO),
    "first_rloo": partial(on_policy_conformance.held, on_policy_conformance.FIRST_RLOO),
    "grpo": grpo_conformance.held,
    "kto": partial(supervised_conformance.held, KTO),
    "ppo": partial(on_policy_conformance.held, on_policy_conformance.PPO),
    "sft": partial(supervised_conformance.held, SFT),
    "reward": partial(supervised_conformance.held, REWARD),
    "rloo": partial(grpo_conformance.held, method=RLOO),
}
"""By trainer, what trains with one setting, and compares."""
_SHOWN = 40
"""Differences that are returned: those of the first step say enough."""


def hold(
    trainer: str,
    subject: str,
    model: TinyModel,
    settings: Mapping[str, Mapping[str, Any]],
    seed: int = 0,
    partly: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Train with each setting, and compare.

    Args:
        trainer: one of :data:`pytest_trlcompat.conformance.rows.TRAINERS`.
        seed: of the data.
        partly: settings that are tried without what this release does not know; any other one then is not.

    Returns:
        By setting: ``failure``, what the training ended in; ``differences``, each with ``stage``, ``where``,
        ``expected``, ``found``, ``off`` and ``allowed``, the first one first; ``compared``, how many quantities;
        ``unseen``, ``unheld`` and ``shortfall``, see :class:`~pytest_trlcompat.conformance.comparison.Held`; and
        ``unknown``, what of the setting this release does not know; and, where something that it needs is not
        installed, or rounding hides everything, ``lacking``, what to say of it. Where ranks fail differently, the rest
        is missing: see :func:`.in_step.in_turn`.

    Raises:
        LeftAlone: other ranks wait for this one, which failed.
    """

    def held(name: str) -> dict[str, Any]:
        try:
            with liger.uncompiled(settings[name]):
                found = _HELD[trainer](subject, model, settings[name], seed, name in partly)
        except comparison.Unsteady as error:  # in bfloat16, say, of a loss whose terms cancel
            found = {"failure": None, "differences": [], "compared": 0, "unknown": []}
            found["lacking"] = f"rounding changes the first step so much that nothing can be told: {error}"
        return {**found, "differences": found["differences"][:_SHOWN]}

    every = in_step.in_turn(settings, held)
    if all(each["unknown"] for each in every.values()):
        _meet()
    return every


def _meet() -> None:
    """What a training does first: a release that knows no setting of a launch has none, and a launch demands it."""
    from accelerate import PartialState

    PartialState()
