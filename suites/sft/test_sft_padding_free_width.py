"""Known issue ``sft-padding-free-width`` (trl 3996): rows without padding have no width of a multiple.

Right is: with ``pad_to_multiple_of`` "the sequences will be padded to a multiple of this value", with ``padding_free``
too. A training shows it only with flash attention, which no CPU has; the collator is no trainer's, and there is
upstream alone to be judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge

from ..in_rank import sft_rows
from ..measured import every

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher

pytestmark = pytest.mark.known_issue("sft-padding-free-width")

ROWS = ((5, 6, 7), (8, 9))


@pytest.mark.parametrize("subject", ["upstream"])
def test_width(subject: str, judge: Judge, launcher: Launcher) -> None:
    def measure() -> Finding:
        (found,) = launcher(sft_rows.flattened, ROWS, sft_rows.MULTIPLE, strategy="single").values
        if found is None:
            raise Absent("this release's collator puts no rows behind each other")
        widths = {name: len(values) for name, values in found.items()}
        is_right = every(each == sft_rows.MULTIPLE for each in widths.values())
        return Finding(Verdict.OK if is_right else Verdict.SILENT, {"widths": widths, "multiple": sft_rows.MULTIPLE})

    judge(measure, subject=subject, strategy="single")
