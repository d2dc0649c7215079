"""How SFT puts rows together: how many bins packing fills, and labels and width of rows without padding.

Neither packing nor the collator is a trainer's, and there is upstream alone to be judged.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge

from ..in_rank import sft_rows
from ..measured import every

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher

PACKED_ROWS = 200
# trl 0.19 to 0.21 looks for a bin with room in a tree that is right for powers of two alone.
SIZES = (32, 24, 48, 100)
"""Of bins; the first one is a power of two."""
ROWS = ((5, 6, 7), (8, 9), (10, 11, 12, 13))
"""Of token ids, to be put behind each other."""


@pytest.mark.known_issue("sft-packing-bins")
@pytest.mark.parametrize("subject", ["upstream"])
def test_bins(subject: str, judge: Judge, launcher: Launcher) -> None:
    """Rows are packed into more bins than they need (trl 3888).

    Right is: as many bins as best-fit decreasing, the documented strategy, fills, whatever their size.
    """

    def measure() -> Finding:
        bins: dict[str, dict[str, int]] = {}
        for size in SIZES:
            chosen = random.Random(size)
            lengths = [chosen.randint(1, size) for _ in range(PACKED_ROWS)]
            (packing,) = launcher(sft_rows.packed, lengths, size, strategy="single").values
            if packing is None:
                raise Absent("this release packs rows by no strategy that has a name")
            bins[str(size)] = packing
        is_wasteful = any(packing["filled"] > packing["needed"] for packing in bins.values())
        return Finding(Verdict.WASTEFUL if is_wasteful else Verdict.OK, {"rows": PACKED_ROWS, "bins": bins})

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("sft-padding-free-labels")
@pytest.mark.parametrize("subject", ["upstream"])
def test_first_tokens(subject: str, judge: Judge, launcher: Launcher) -> None:
    """The last token of a row learns to predict the next row's first (trl 4170).

    Right is: of rows that are put behind each other without padding, the first token of each has no label, since
    nothing predicts it. A training shows it only with flash attention, which no CPU has.
    """

    def measure() -> Finding:
        (batch,) = launcher(sft_rows.flattened, ROWS, None, strategy="single").values
        if batch is None:
            raise Absent("this release's collator puts no rows behind each other")
        assert batch["input_ids"] == [token for row in ROWS for token in row], batch
        starts = [place for place, position in enumerate(batch["position_ids"]) if place and not position]
        # Where the second and the third of ROWS begin.
        assert starts == [3, 5], batch
        labels = [batch["labels"][place] for place in starts]
        is_right = all(label == -100 for label in labels)
        return Finding(Verdict.OK if is_right else Verdict.SILENT, {"labels_of_first_tokens": labels})

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("sft-padding-free-width")
@pytest.mark.parametrize("subject", ["upstream"])
def test_width(subject: str, judge: Judge, launcher: Launcher) -> None:
    """Rows without padding have no width of a multiple (trl 3996).

    Right is: with ``pad_to_multiple_of`` "the sequences will be padded to a multiple of this value", with
    ``padding_free`` too. A training shows it only with flash attention, which no CPU has.
    """

    def measure() -> Finding:
        (batch,) = launcher(sft_rows.flattened, ROWS[:2], sft_rows.MULTIPLE, strategy="single").values
        if batch is None:
            raise Absent("this release's collator puts no rows behind each other")
        widths = {name: len(values) for name, values in batch.items()}
        is_right = every(width == sft_rows.MULTIPLE for width in widths.values())
        return Finding(Verdict.OK if is_right else Verdict.SILENT, {"widths": widths, "multiple": sft_rows.MULTIPLE})

    judge(measure, subject=subject, strategy="single")
