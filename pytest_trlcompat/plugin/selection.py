"""The marker ``known_issue``: which catalogue entry a suite shows; and how ``--trlcompat-issue`` and
``--trlcompat-subject`` select suites.

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


def deselect(
    items: Sequence[pytest.Item], wanted: Sequence[str], subject: str | None = None
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split tests into those that stay and those that go.

    Args:
        wanted: ids of known issues, of which only the suites stay; empty: all tests stay.
        subject: of a known issue's suites only those for this one stay; ``None``: for both.

    Raises:
        IssueError: an id in ``wanted`` or at a test is unknown, or a suite does not tell its subject.
    """
    _check(wanted, "option --trlcompat-issue")
    stay: list[pytest.Item] = []
    go: list[pytest.Item] = []
    for item in items:
        issue_id = issue_of(item)
        chosen = not wanted or issue_id in wanted
        if chosen and issue_id is not None and subject is not None:
            chosen = _subject_of(item) == subject
        (stay if chosen else go).append(item)
    return stay, go


def _subject_of(item: pytest.Item) -> str:
    parameters = getattr(item, "callspec", None)
    if parameters is None or "subject" not in parameters.params:
        raise IssueError(
            f"{item.nodeid} shows a known issue and does not tell for which trainer, which --trlcompat-subject asks; "
            "give it the parameter subject, as in parametrize('subject', ['upstream', 'corrected'])"
        )
    return str(parameters.params["subject"])


def _check(ids: Iterable[str], where: str) -> None:
    for issue_id in ids:
        try:
            known_issues.load().get_issue(issue_id)
        except known_issues.CatalogError as error:
            raise IssueError(f"{where}: {error}") from error
