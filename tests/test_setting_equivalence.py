"""How a training of several ranks is judged by one of a single process: a number that is not logged is a wrong one."""

from __future__ import annotations

import math
from array import array
from typing import Any

from pytest_trlcompat.catalog.verdict import Verdict
from suites.in_rank.settings import LOGGED, STEPS
from suites.settings.equivalence import judge_setting


def training(**logs: list[float]) -> dict[str, Any]:
    """What a rank returns of a training that moved one weight by 1."""
    return {
        "failure": None,
        "gathering": None,
        "losses": [0.5] * STEPS,
        "logs": {**{name: [1.0] * STEPS for name in LOGGED}, **logs},
        "dtypes": ["torch.float32"],
        "checkpointing": [],
        "initial": {"weight": array("f", [0.0]).tobytes()},
        "trained": {"weight": array("f", [1.0]).tobytes()},
    }


def test_the_same_numbers_are_right() -> None:
    assert judge_setting("setting-equivalence", [training()], [training()]).verdict is Verdict.OK


def test_a_number_that_is_not_logged_is_wrong() -> None:
    found = judge_setting("setting-equivalence", [training(grad_norm=[])], [training()])
    assert found.verdict is Verdict.SILENT
    assert found.evidence["grad_norm"] == []
    assert list(found.evidence["wrong"]) == ["grad_norm"]
    assert found.evidence["wrong"]["grad_norm"]["off"] == math.inf
