"""Known issue ``sft-packing-bins`` (trl 3888): rows are packed into more bins than they need.

Right is: as many bins as best-fit decreasing, the documented strategy, fills, whatever their size. Packing is no
trainer's, and there is upstream alone to be judged.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge

from ..in_rank import sft_rows

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher

pytestmark = pytest.mark.known_issue("sft-packing-bins")

ROWS = 200
SIZES = (32, 24, 48, 100)
"""Of bins; the first one is a power of two."""


@pytest.mark.parametrize("subject", ["upstream"])
def test_bins(subject: str, judge: Judge, launcher: Launcher) -> None:
    def measure() -> Finding:
        bins: dict[str, dict[str, int]] = {}
        for size in SIZES:
            chosen = random.Random(size)
            lengths = [chosen.randint(1, size) for _ in range(ROWS)]
            (found,) = launcher(sft_rows.packed, lengths, size, strategy="single").values
            if found is None:
                raise Absent("this release packs rows by no strategy that has a name")
            bins[str(size)] = found
        is_wasteful = any(each["filled"] > each["needed"] for each in bins.values())
        return Finding(Verdict.WASTEFUL if is_wasteful else Verdict.OK, {"rows": ROWS, "bins": bins})

    judge(measure, subject=subject, strategy="single")
