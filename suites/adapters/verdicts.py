"""How trainings of an adapter are judged: by what every rank failed with, and by the corrected trainer in one process.

Runs in the test process and imports nothing of the stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding

from ..launches import Failures, distinct
from ..verdicts import failure_of, unequal

__all__ = ["as_in_one_process", "failures_in", "with_every_failure"]

_OTHERS = "failures_of_other_ranks"
_KEYS = ("trainable", "without_gradient", "frozen_moved", "grad_norm", "weights")


def with_every_failure(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What rank 0 measured of one variant, with the ``failure`` of any rank, and what others failed with beside it.

    Args:
        ranks: what :func:`adapters.lora_trainings` measured of the variant on each.
    """
    texts = distinct(rank["failure"] for rank in ranks)
    others = {_OTHERS: texts[1:]} if texts[1:] else {}
    return {**ranks[0], "failure": texts[0] if texts else None, **others}


def failures_in(runs: Mapping[str, Mapping[str, Any]]) -> Failures:
    """Those of the variants of a group, by their names."""
    return Failures(
        {name: run["failure"] for name, run in runs.items() if run["failure"]},
        {name: run[_OTHERS] for name, run in runs.items() if _OTHERS in run},
    )


def as_in_one_process(issue: str, run: Mapping[str, Any], truth: Mapping[str, Any], steps: int) -> Finding:
    """``ok`` where all that shall learn had a finite gradient at each step, and nothing else moved, and where gradient
    norms and the weights afterwards are those of one process, relative to their size.

    Args:
        run, truth: what :func:`adapters.lora_trainings` measured of one variant.
        steps: how many the truth must have.
    """
    failed = failure_of(issue, {"train": run["failure"]} if run["failure"] else {})
    if failed:
        return Finding(failed, dict(run))
    assert len(truth["grad_norm"]) == steps, truth
    assert truth["grad_norm"][-1] > 0, truth
    evidence = {key: run[key] for key in _KEYS} | {f"{key}_in_one_process": truth[key] for key in _KEYS}
    wrong = (
        run["trainable"] != truth["trainable"]
        or run["without_gradient"]
        or run["frozen_moved"]
        or unequal(run["grad_norm"], truth["grad_norm"], relative=True)
        or unequal([run["weights"]], [truth["weights"]], relative=True)
    )
    return Finding(Verdict.SILENT if wrong else Verdict.OK, evidence)
