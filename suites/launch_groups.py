"""Which tests judge the same launches, so that a sweep that runs several processes of a cell makes each launch once.

A launch that two groups make in two processes is made twice, and nothing else is lost. Imports nothing of the stack.
"""

from __future__ import annotations

import re

import pytest

from pytest_trlcompat.catalog.issue import measured_with
from pytest_trlcompat.strategies import NAMES

from .conformance.row_choice import launch_of

__all__ = ["group_of"]

# The longest first, since a name may be how another one begins.
_UNDER = re.compile(rf"under_({'|'.join(map(re.escape, sorted(NAMES, key=len, reverse=True)))})")


def group_of(item: pytest.Item) -> str:
    """The name of the group of a test: its subject, and its launch of rows, or its folder of suites and strategy."""
    values = getattr(getattr(item, "callspec", None), "params", {})
    subject, label = str(values.get("subject", "")), values.get("label")
    if item.path.parent.name == "conformance" and isinstance(label, str):
        trainer = str(values["trainer"]) if "trainer" in values else _measured(item)
        first = launch_of(trainer, label).rows[0].label
        return f"{trainer} {subject} {first}"
    return f"{item.path.parent.name} {subject} {_strategy(item, values)}".strip()


def _measured(item: pytest.Item) -> str:
    marker = item.get_closest_marker("known_issue")
    return measured_with(marker.args[0]) if marker else ""


def _strategy(item: pytest.Item, values: dict[str, object]) -> str:
    for value in values.values():
        if isinstance(value, str) and value.partition("-")[0] in NAMES:
            return value.partition("-")[0]
    match = _UNDER.search(item.name)
    return match[1] if match else ""
