"""Known issue ``trainer-accumulation``: any Trainer's step over several micro-batches is not that of their mean.

Right is: after two steps of two micro-batches, with a loss that is a mean of its micro-batch, every weight is where
plain SGD on the mean of all micro-batches and ranks puts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import accumulation
from ..launches import Failures
from ..sharding.trainings import built_as_asked
from ..verdicts import failure_of

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

ISSUE = "trainer-accumulation"
TOLERANCE = 1e-3
"""Of a distance to how far the weights have moved: some hundred times the rounding of a weight that moves by a tenth of
its gradient. A micro-batch that is lost, or counts twice, shows by a third and more."""
pytestmark = pytest.mark.known_issue("trainer-accumulation")


@pytest.mark.parametrize("strategy", load()[ISSUE].strategies)
def test_accumulation(strategy: str, subject: str, judge: Judge, launches: LaunchCache, saved_qwen2: TinyModel) -> None:
    def measure() -> Finding:
        # One that fails may have built no engine; of one that has trained it is asked below.
        result = launches(accumulation.train, subject, saved_qwen2, strategy=strategy, sharded=False)
        ranks, engines = result.values, result.ranks[0].proof["engines"]
        failures = Failures.of([{"training": rank["failure"]} for rank in ranks])
        failed = failure_of(ISSUE, failures.first)
        if failed is not None:
            return Finding(failed, {"failures": failures.first, **failures.of_other_ranks})
        built_as_asked(strategy, engines, None)
        assert engines or strategy == "single", f"{strategy} was asked for, and no engine was built"
        found = {name: value for name, value in ranks[0].items() if name != "failure"}
        right = found["moved"] < TOLERANCE
        return Finding(Verdict.OK if right else Verdict.SILENT, found)

    judge(measure, subject=subject, strategy=strategy)
