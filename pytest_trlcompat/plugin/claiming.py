"""A plugin of its own, for sweeps: this process runs those groups of tests that no other process of its cell has taken.

``-p pytest_trlcompat.plugin.claiming --trlcompat-claims FOLDER``; see :mod:`pytest_trlcompat.matrix.claims`. A group
has the tests with the same marker ``launch_group``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import SEVERITIES
from pytest_trlcompat.matrix.claims import Claim, GroupTable
from pytest_trlcompat.plugin.selection import issue_of

__all__ = ["pytest_addoption", "pytest_configure", "pytest_runtestloop"]

_OPTION = "--trlcompat-claims"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, metavar="FOLDER", required=True, help="what the processes of a cell share")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "launch_group(name): tests that judge the same launches, in one process")


def group_of(item: pytest.Item) -> str:
    """The name of the group of a test; without the marker it is one with the others of its file."""
    marker = item.get_closest_marker("launch_group")
    return str(marker.args[0]) if marker else item.nodeid.partition("::")[0]


def is_first_answer(item: pytest.Item) -> bool:
    """Whether a test judges a known issue of the worst severity, and no search for unknown ones."""
    issue_id = issue_of(item)
    if issue_id is None:
        return False
    issue = known_issues.load().get_issue(issue_id)
    return issue.severity == SEVERITIES[0] and not issue.is_search


# Before pytest's own loop, which would run every test; an answer other than None keeps it from that.
@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if session.config.getoption("collectonly") or session.testsfailed:
        return None
    members: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        members.setdefault(group_of(item), []).append(item)
    answers = [name for name, items in members.items() if any(map(is_first_answer, items))]
    table = GroupTable(Path(session.config.getoption(_OPTION)))
    groups = table.arrange({name: len(items) for name, items in members.items()}, answers)
    current = table.claim(groups)
    while current is not None:
        current = _run(session, table, current, members)
    return True


def _run(
    session: pytest.Session, table: GroupTable, claim: Claim, members: dict[str, list[pytest.Item]]
) -> Claim | None:
    """Run a group, and take the next one before its last test."""
    items = members[claim.group.name]
    following: Claim | None = None
    claim.begins()
    for number, item in enumerate(items, start=1):
        if number < len(items):
            nextitem: pytest.Item | None = items[number]
        else:
            # Now, since pytest tears down after the last test what the next one does not need.
            following = table.claim(table.groups or ())
            nextitem = members[following.group.name][0] if following else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        # As in pytest's own loop, after each test.
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    claim.done()
    return following
