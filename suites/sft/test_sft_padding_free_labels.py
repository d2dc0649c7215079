"""Known issue ``sft-padding-free-labels`` (trl 4170): the last token of a row learns to predict the next row's first.

Right is: of rows that are put behind each other without padding, the first token of each has no label, since nothing
predicts it. A training shows it only with flash attention, which no CPU has; the collator is no trainer's, and there is
upstream alone to be judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge

from ..in_rank import sft_rows

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher

pytestmark = pytest.mark.known_issue("sft-padding-free-labels")

ROWS = ((5, 6, 7), (8, 9), (10, 11, 12, 13))


@pytest.mark.parametrize("subject", ["upstream"])
def test_first_tokens(subject: str, judge: Judge, launcher: Launcher) -> None:
    def measure() -> Finding:
        (found,) = launcher(sft_rows.flattened, ROWS, None, strategy="single").values
        if found is None:
            raise Absent("this release's collator puts no rows behind each other")
        assert found["input_ids"] == [token for row in ROWS for token in row], found
        starts = [place for place, position in enumerate(found["position_ids"]) if place and not position]
        assert starts == [3, 5], found
        labels = [found["labels"][place] for place in starts]
        is_right = all(each == -100 for each in labels)
        return Finding(Verdict.OK if is_right else Verdict.SILENT, {"labels_of_first_tokens": labels})

    judge(measure, subject=subject, strategy="single")
