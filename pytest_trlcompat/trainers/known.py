"""Which known issues each mixin cures, read from ``known.json``, which is made from the catalogue.

    python -m pytest_trlcompat.catalog.cures_page docs/cures.md  # writes it anew, beside that page

So that users can train with the mixins without the catalogue. Imports only the standard library.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FILE", "CuredIssue", "issues_of"]

FILE = Path(__file__).with_name("known.json")


@dataclass(frozen=True)
class CuredIssue:
    """A known issue that a mixin cures.

    Attributes:
        id: in the catalogue.
        title: one line.
        upstream: links to reports and fixes.
    """

    id: str
    title: str
    upstream: tuple[str, ...]


@functools.cache
def _issues() -> dict[str, tuple[CuredIssue, ...]]:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        mixin: tuple(CuredIssue(one["id"], one["title"], tuple(one["upstream"])) for one in issues)
        for mixin, issues in stored.items()
    }


def issues_of(mixin: str) -> tuple[CuredIssue, ...]:
    """Those of a mixin, by its class name, in the order of the catalogue; none where no entry names it."""
    return _issues().get(mixin, ())
