"""The plugin's hooks: settings, the run's header, markers, the selection of suites."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence

import pytest

from pytest_trlcompat import __version__, stack
from pytest_trlcompat.plugin import fixtures, markers, preloading, selection, settings, strategies

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_make_collect_report",
    "pytest_report_collectionfinish",
    "pytest_report_header",
    "pytest_runtest_setup",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    settings.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for line in (*markers.LINES, selection.LINE, *markers.GPU_LINES, strategies.LINE):
        config.addinivalue_line("markers", line)
    try:
        config.stash[settings.KEY] = settings.read_settings(config)
        config.stash[settings.DEVICE_KEY] = settings.resolve_device(config.stash[settings.KEY].device)
        # An unknown id must end the run here: pytest-xdist treats an error in its workers at collection as a crash.
        selection.deselect([], config.stash[settings.KEY].issue.value)
    except (settings.SettingError, selection.IssueError) as error:
        # --help must also work with a broken configuration.
        if not config.getoption("help") and not config.getoption("version"):
            raise pytest.UsageError(f"trlcompat: {error}") from error


def pytest_report_header(config: pytest.Config) -> list[str]:
    from pytest_trlcompat._escaping import printable
    from pytest_trlcompat._secrets import redacted

    device, installed = config.stash[settings.DEVICE_KEY], stack.installed()
    lines = [
        f"trlcompat: {__version__}, {stack.describe(installed)}",
        f"trlcompat: device {device.name} ({device.why})",
    ]
    changed = config.stash[settings.KEY].changed()
    if changed:
        shown = (f"{name} {_text(setting.value)} ({setting.where})" for name, setting in changed.items())
        lines.append(f"trlcompat: settings {', '.join(shown)}")
    lines += preloading.lines(config)
    if _is_asked_for(config):
        lines += _issues_line(config)
    return [printable(redacted(line)) for line in lines]


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """The line of the header that takes time, in projects that use the plugin's fixtures and do not name the plugin."""
    return [] if _is_asked_for(config) or not any(map(_uses_fixtures, items)) else _issues_line(config)


def _issues_line(config: pytest.Config) -> list[str]:
    from pytest_trlcompat._escaping import printable
    from pytest_trlcompat.plugin import header

    issues = header.line_once(stack.installed(), getattr(config, "cache", None))
    return [] if issues is None else [printable(f"trlcompat: {issues}")]


_NAMES = ("trlcompat", "pytest_trlcompat.plugin")


def _is_asked_for(config: pytest.Config) -> bool:
    """Whether a project names the plugin; else it may merely be installed beside it.

    It is named on a command line or in ``addopts`` (``-p trlcompat``), in ``PYTEST_PLUGINS``, or in the
    ``pytest_plugins`` of a ``conftest.py``.
    """
    named = {*config.option.plugins, *os.environ.get("PYTEST_PLUGINS", "").split(",")}
    for module in config.pluginmanager.get_plugins():
        plugins = getattr(module, "pytest_plugins", ())
        named |= {plugins} if isinstance(plugins, str) else set(plugins)
    # Its entry point has the name trlcompat; it has that of the module only where somebody asks for it.
    return not named.isdisjoint(_NAMES) or config.pluginmanager.has_plugin(_NAMES[-1])


def _uses_fixtures(item: pytest.Item) -> bool:
    """Whether it uses a fixture of this plugin's; one of the same name may be the project's."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return any(definition[-1].func.__module__ == fixtures.__name__ for definition in definitions.values())


def _is_ours(item: pytest.Item) -> bool:
    """Whether markers of this plugin's names are meant for it: other projects have a ``gpu`` and ``versions``, too."""
    return _is_asked_for(item.config) or _uses_fixtures(item)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Report invalid markers of ours as a collection error of the module, like one that cannot be imported."""
    report = yield
    errors = _marker_errors(node for node in report.result if isinstance(node, pytest.Item))
    if errors:
        # No usage error, since pytest-xdist treats one in a worker as a crash.
        report.outcome = "failed"
        report.longrepr = "\n".join(errors)
        report.result = []
    return report


@pytest.hookimpl(trylast=True)  # other plugins add markers in this hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    errors = _marker_errors(items)
    if errors:
        raise pytest.UsageError("\n".join(errors))
    _select_issues(config, items)
    versions, device = stack.installed(), config.stash[settings.DEVICE_KEY]
    for item in items:
        reason = markers.skip_reason(_marks(item, markers.NAME), versions)
        if reason is None and device.name != "cuda" and _marks(item, markers.GPU):
            reason = f"needs a GPU, but launches use the device {device.name} ({device.why})"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _marks(item: pytest.Item, name: str) -> list[pytest.Mark]:
    """The markers of a name, the closest first: those with the plugin's own name before it, and the plain ones of tests
    that are this plugin's."""
    names = {markers.namespaced(name), *([name] if _is_ours(item) else [])}
    return [mark for mark in item.iter_markers() if mark.name in names]


@pytest.hookimpl(tryfirst=True)  # before fixtures that launch something
def pytest_runtest_setup(item: pytest.Item) -> None:
    # What a suite measures must not depend on the filters and levels of the project beside which it runs.
    is_suite = item.get_closest_marker("known_issue") is not None
    item.config.stash[settings.RELAYED_KEY] = not is_suite
    item.config.stash[settings.WATCHED_KEY] = not is_suite and _is_ours(item)


def _select_issues(config: pytest.Config, items: list[pytest.Item]) -> None:
    values = config.stash[settings.KEY]
    if not values.issue.value and values.subject.value is None:
        # Nothing is to be selected, and a marker of this name may be somebody else's.
        return
    try:
        chosen, others = selection.deselect(items, values.issue.value, values.subject.value)
    except selection.IssueError as error:
        raise pytest.UsageError(f"trlcompat: {error}") from error
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


def _marker_errors(items: Iterable[pytest.Item]) -> list[str]:
    errors = []
    for item in items:
        try:
            for mark in _marks(item, markers.NAME):
                markers.parse_mark(mark)
            if _is_ours(item):
                selection.issue_of(item)
                _check_strategies(item)
        except markers.MarkerError as error:
            errors.append(f"{item.nodeid}: marker versions: {error}")
        except selection.IssueError as error:
            errors.append(str(error))
        except strategies.StrategiesError as error:
            errors.append(f"{item.nodeid}: marker strategies: {error}")
    return errors


def _check_strategies(item: pytest.Item) -> None:
    for mark in item.iter_markers("strategies"):
        strategies.check_mark(mark)
        # At a class or a module it is for those of its tests that use the fixture.
        if mark in item.own_markers and strategies.FIXTURE not in getattr(item, "fixturenames", ()):
            raise strategies.StrategiesError(f"it does nothing, since the test does not use {strategies.FIXTURE}")


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
