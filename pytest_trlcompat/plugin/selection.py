"""The marker ``known_issue``: which catalogue entry a suite shows, and how ``--trlcompat-issue`` selects suites by it.

Part of the plugin; imports no package of the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from pytest_trlcompat.catalog import known_issues

__all__ = ["LINE", "IssueError", "deselect", "issue_of"]

LINE = "known_issue(id): this test shows the known issue ID of the catalogue, for subject upstream or corrected."


class IssueError(ValueError):
    """A test or an option names no known issue."""


def issue_of(item: pytest.Item) -> str | None:
    """The id of the issue that a test shows.

    Raises:
        IssueError: the marker has no id or an unknown one.
    """
    mark = item.get_closest_marker("known_issue")
    if mark is None:
        return None
    if len(mark.args) != 1 or mark.kwargs:
        raise IssueError(f"{item.nodeid}: marker known_issue takes one id, like known_issue('grpo-logits-to-keep')")
    issue_id = str(mark.args[0])
    _check((issue_id,), item.nodeid)
    return issue_id


def deselect(items: Sequence[pytest.Item], wanted: Sequence[str]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split tests into those that stay and those that go: with ``wanted`` ids only their suites stay.

    Raises:
        IssueError: an id in ``wanted`` or at a test is unknown.
    """
    _check(wanted, "option --trlcompat-issue")
    chosen = [(item, issue_of(item)) for item in items]
    if not wanted:
        return list(items), []
    return (
        [item for item, issue_id in chosen if issue_id in wanted],
        [item for item, issue_id in chosen if issue_id not in wanted],
    )


def _check(ids: Iterable[str], where: str) -> None:
    for issue_id in ids:
        try:
            known_issues.load().get_issue(issue_id)
        except known_issues.CatalogError as error:
            raise IssueError(f"{where}: {error}") from error
