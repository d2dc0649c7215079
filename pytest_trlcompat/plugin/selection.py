"""The marker ``known_issue``: which catalogue entry a suite shows; and how ``--trlcompat-issue`` and
``--trlcompat-subject`` select suites.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from pytest_trlcompat.catalog import known_issues

__all__ = ["LINE", "IssueError", "deselect", "issue_of"]

LINE = "known_issue(id): this test shows the known issue ID of the catalogue, for the subject upstream or corrected."


class IssueError(ValueError):
    """A test or an option names an unknown issue."""


def issue_of(item: pytest.Item) -> str | None:
    """The id of the issue that a test shows.

    Raises:
        IssueError: when the marker has no id or an unknown one.
    """
    mark = item.get_closest_marker("known_issue")
    if mark is None:
        return None
    if len(mark.args) != 1 or mark.kwargs:
        raise IssueError(f"{item.nodeid}: the marker known_issue needs one id, like known_issue('grpo-logits-to-keep')")
    issue_id = str(mark.args[0])
    _check((issue_id,), item.nodeid)
    return issue_id


def deselect(
    items: Sequence[pytest.Item], issue_ids: Sequence[str], subject: str | None = None
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split tests into selected and deselected ones.

    Args:
        issue_ids: of known issues whose suites are selected; empty: all tests are.
        subject: the one for which suites of known issues are selected; ``None``: both.

    Raises:
        IssueError: an id in ``issue_ids`` or at a test is unknown, or a suite does not name its subject.
    """
    _check(issue_ids, "option --trlcompat-issue")
    selected: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        issue_id = issue_of(item)
        chosen = not issue_ids or issue_id in issue_ids
        if chosen and issue_id is not None and subject is not None:
            chosen = _subject_of(item) == subject
        (selected if chosen else deselected).append(item)
    return selected, deselected


def _subject_of(item: pytest.Item) -> str:
    parameters = getattr(item, "callspec", None)
    if parameters is None or "subject" not in parameters.params:
        raise IssueError(
            f"{item.nodeid} shows a known issue but has no parameter subject, which --trlcompat-subject needs; "
            "add one with parametrize('subject', ['upstream', 'corrected'])"
        )
    return str(parameters.params["subject"])


def _check(ids: Iterable[str], where: str) -> None:
    for issue_id in ids:
        try:
            known_issues.load().get_issue(issue_id)
        except known_issues.CatalogError as error:
            raise IssueError(f"{where}: {error}") from error
