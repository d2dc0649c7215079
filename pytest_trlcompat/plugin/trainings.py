"""What the end of a pytest run says of the trainings of its tests: the known issues that bite them, each once.

Trainings of launches say it with what their ranks logged; those of the test process itself are looked at here, if
Transformers was imported before the test. It rides on the reports of tests, so that it also arrives from the workers of
pytest-xdist. Suites of known issues are left out: they train so that an issue shows; so are projects beside which the
plugin is merely installed. Imports no package of the stack.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

import pytest

from pytest_trlcompat.plugin import settings

__all__ = ["PROPERTY", "lines", "pytest_runtest_call", "pytest_runtest_makereport", "remember"]

PROPERTY = "trlcompat-trainings"
"""Of a report: a JSON object of issues that bit its trainings, and a line for each."""
_KEY = pytest.StashKey[dict[str, str]]()


def remember(config: pytest.Config, issues: Mapping[str, str]) -> None:
    """Keep the issues of a training, by their ids, for the report of the test that runs."""
    config.stash.setdefault(_KEY, {}).update(issues)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    import sys

    if "transformers.trainer" not in sys.modules or not item.config.stash.get(settings.WATCHED_KEY, False):
        return (yield)
    from pytest_trlcompat.launch.beginnings import Beginnings

    trainings = Beginnings()
    try:
        with trainings.watching():
            return (yield)
    finally:
        remember(item.config, trainings.issues)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if issues := item.config.stash.get(_KEY, {}):
        report.user_properties.append((PROPERTY, json.dumps(issues)))
        item.config.stash[_KEY] = {}
    return report


def lines(reporter: Any) -> list[str]:
    """One line for each issue, in the order of their ids."""
    issues: dict[str, str] = {}
    for reports in reporter.stats.values():
        for report in reports:
            for name, text in getattr(report, "user_properties", ()):
                if name == PROPERTY:
                    issues.update(json.loads(text))
    return [issues[name] for name in sorted(issues)]
