"""Known issue ``ppo-adapter-reference``: PPO holds its policy against itself without the adapter.

Right is: the numbers of each step are those of a training whose reference is a copy of the policy, made before it got
its adapter; and the adapter that is saved is bitwise the one that was trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.conformance.ppo import objects as ppo
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge

from ..in_rank.ppo_adapters import REFERENCES, adapter_trainings
from .runs import TOLERANCE, greatest_difference, require_ppo

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.tiny import TinyModel

COPY, OFF = REFERENCES
pytestmark = pytest.mark.known_issue("ppo-adapter-reference")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1"])
def test_training(
    strategy: str, subject: str, judge: Judge, launch_once: Callable[..., list[Any]], saved_mistral: TinyModel
) -> None:
    def trainings(of: str, references: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        first: dict[str, Any] = launch_once(adapter_trainings, of, saved_mistral, references, strategy=strategy)[0]
        return first

    def measure() -> Finding:
        require_ppo()
        if not stack.satisfied({"trl": ">=0.13"}, stack.installed()):
            raise Absent("PPO takes adapters from trl 0.13.0 on")
        found = trainings(subject, REFERENCES if subject == "corrected" else (OFF,))[OFF]
        truth = trainings("corrected", REFERENCES)[COPY]
        assert len(truth["log"]) == ppo.STEPS, truth
        kl = [[entry["objective/kl"] for entry in training["log"]] for training in (found, truth)]
        assert max(map(abs, kl[1])) > 10 * TOLERANCE, f"the policy is far from its reference: {kl}"
        difference = greatest_difference(found["log"], truth["log"])
        evidence = {
            "max_difference_to_copy": difference,
            "kl": kl[0],
            "kl_to_copy": kl[1],
            **{key: found[key] for key in ("trained", "saved", "equal")},
        }
        right = difference <= TOLERANCE and 0 < found["trained"] == found["saved"] == found["equal"]
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=strategy)
