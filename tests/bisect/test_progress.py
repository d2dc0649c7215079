"""Progress lines."""

from __future__ import annotations

import pytest

from pytest_trlcompat.bisect.progress import duration


@pytest.mark.parametrize("seconds, text", [(40.4, "40 s"), (89, "89 s"), (170, "3 min"), (6000, "1.7 h")])
def test_durations_have_one_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text
