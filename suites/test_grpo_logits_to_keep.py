"""Known issue ``grpo-logits-to-keep`` (trl 2770): the keyword that shortens the logits, and the numbers behind it.

TRL asks the model for the last K + 1 logits only, by a keyword whose name changed. A release of Transformers that does
not know the name swallows it: at best all logits are materialised, at worst the wrong positions are scored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.judge import Finding, Judge
from pytest_trlcompat.verdict import Verdict

from . import grpo_measures

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel

pytestmark = pytest.mark.known_issue("grpo-logits-to-keep")

TOLERANCE = 1e-5
"""Of a log-probability in float32: two orders above rounding, four below the errors of the bug."""


def test_single(subject: str, judge: Judge, launcher: Launcher, saved_qwen2: TinyModel) -> None:
    # 0.14 and 0.15 do not divide by the temperature, which is another matter; ours must be right at any.
    temperatures = (1.0, 0.7) if subject == "corrected" else (1.0,)

    def measure() -> Finding:
        runs = [_run(launcher, subject, saved_qwen2, temperature) for temperature in temperatures]
        verdicts = [_verdict(run) for run in runs]
        worst = next((verdict for verdict in verdicts if verdict is not Verdict.OK), Verdict.OK)
        evidence = dict(runs[0])
        for run in runs[1:]:
            evidence[f"at_temperature_{run['temperature']}"] = run
        return Finding(worst, evidence)

    judge(measure, subject=subject, strategy="single")


def _run(launcher: Callable[..., Any], subject: str, model: TinyModel, temperature: float) -> dict[str, Any]:
    result = launcher(grpo_measures.logits_to_keep, subject, model, temperature, strategy="single")
    measured: dict[str, Any] = result.values[0]
    return measured


def _verdict(run: dict[str, Any]) -> Verdict:
    assert run["logits_length"] <= run["sequence"], "the hook on the output head saw more positions than there are"
    if not run["max_abs_error"] <= TOLERANCE:  # also NaN
        return Verdict.SILENT
    if not abs(run["kl"][0]) <= TOLERANCE:
        return Verdict.SILENT
    return Verdict.WASTEFUL if run["logits_length"] > run["kept"] else Verdict.OK
