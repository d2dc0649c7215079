"""Known issue ``fsdp2-grad-norm`` (pytorch 170862): under FSDP2 ``grad_norm`` is that of one rank's part.

Right is: the logged norms of two steps are those of a single process, to the tolerance of :mod:`equivalence`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank.sharding import STEPS
from .equivalence import GRAD_NORM_TOLERANCE

if TYPE_CHECKING:
    from .trainings import Trainings

pytestmark = pytest.mark.known_issue("fsdp2-grad-norm")


def test_logged_norms(subject: str, judge: Judge, trained: Trainings) -> None:
    def measure() -> Finding:
        alone, training = trained.single(subject, "fsdp2"), trained(subject, "fsdp2")
        failure = alone.failure or training.failure
        if failure is not None:
            return Finding(Verdict.ERROR, {"failure": failure, **training.failures_of_other_ranks})
        norms, truth = training.first["grad_norm"], alone.first["grad_norm"]
        assert len(truth) == STEPS
        right = norms == pytest.approx(truth, rel=GRAD_NORM_TOLERANCE)
        return Finding(Verdict.OK if right else Verdict.SILENT, {"grad_norm": norms, "grad_norm_single": truth})

    judge(measure, subject=subject, strategy="fsdp2")
