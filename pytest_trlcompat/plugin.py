"""The pytest plugin ``trlcompat``: hooks and fixtures, thin over the other rooms.

pytest loads this module at every start, so it must import neither torch nor transformers, nor a room that is needed
only by some tests: those are imported inside the fixtures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat import __version__, known_issues, markers, settings, stack

if TYPE_CHECKING:
    from datasets import Dataset

    from pytest_trlcompat.judge import Judge
    from pytest_trlcompat.launch import Launcher, LaunchResult
    from pytest_trlcompat.tiny import TinyModel
    from pytest_trlcompat.versions import VersionMatrix

_DEVICE = pytest.StashKey[settings.Device]()


def pytest_addoption(parser: pytest.Parser) -> None:
    settings.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", markers.LINE)
    config.addinivalue_line("markers", known_issues.LINE)
    config.addinivalue_line("markers", markers.GPU_LINE)
    try:
        config.stash[settings.KEY] = settings.read_settings(config)
        config.stash[_DEVICE] = settings.resolve_device(config.stash[settings.KEY].device)
        # An unknown id must end the run here: raised at collection, pytest-xdist's workers would take it for a crash.
        known_issues.deselect([], config.stash[settings.KEY].issue.value)
    except (settings.SettingError, known_issues.IssueError) as error:
        # Help is what somebody with a broken configuration asks for.
        if not config.getoption("help") and not config.getoption("version"):
            raise pytest.UsageError(f"trlcompat: {error}") from error


def pytest_report_header(config: pytest.Config) -> list[str]:
    from pytest_trlcompat.doctor import header

    device, installed = config.stash[_DEVICE], stack.installed()
    lines = [
        f"trlcompat: {__version__}, {stack.describe(installed)}",
        f"trlcompat: device {device.name} ({device.why})",
    ]
    changed = config.stash[settings.KEY].changed()
    if changed:
        shown = (f"{name} {_text(setting.value)} ({setting.where})" for name, setting in changed.items())
        lines.append(f"trlcompat: settings {', '.join(shown)}")
    bites = header.line_once(installed, getattr(config, "cache", None))
    if bites is not None:
        lines.append(f"trlcompat: {bites}")
    return lines


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse our markers where they make no sense: an error of the module, as for one that cannot be imported.

    A usage error would be the alternative, but pytest-xdist's workers take that for a crash.
    """
    report = yield
    refusals = _refusals(node for node in report.result if isinstance(node, pytest.Item))
    if refusals:
        report.outcome = "failed"
        report.longrepr = "\n".join(refusals)
        report.result = []
    return report


@pytest.hookimpl(trylast=True)  # other plugins add markers in this hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    refusals = _refusals(items)
    if refusals:
        raise pytest.UsageError("\n".join(refusals))
    _select_issues(config, items)
    versions, device = stack.installed(), config.stash[_DEVICE]
    for item in items:
        reason = markers.skip_reason(item.iter_markers("versions"), versions)
        if reason is None and device.name != "cuda" and item.get_closest_marker("gpu"):
            reason = f"needs a GPU; the device of launches is {device.name} ({device.why})"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _select_issues(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen, others = known_issues.deselect(items, config.stash[settings.KEY].issue.value)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


def _refusals(items: Iterable[pytest.Item]) -> list[str]:
    refusals = []
    for item in items:
        try:
            for mark in item.iter_markers("versions"):
                markers.parse_mark(mark)
            known_issues.issue_of(item)
        except markers.MarkerError as error:
            refusals.append(f"{item.nodeid}: marker versions: {error}")
        except known_issues.IssueError as error:
            refusals.append(str(error))
    return refusals


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


@pytest.fixture(scope="session")
def tiny_qwen2(_trlcompat_folder: Path) -> Callable[..., TinyModel]:
    """Factory of tiny random Qwen2 models: ``tiny_qwen2(seed=0, vocab_size=64, ...)``.

    What it returns has ``.model``, ``.tokenizer``, ``.config`` and ``.path`` (a folder for ``from_pretrained``, to be
    read only: equal models of a session share it). The same seed gives bitwise the same weights in every process.
    """
    return _factory("qwen2", _trlcompat_folder)


@pytest.fixture(scope="session")
def tiny_mistral(_trlcompat_folder: Path) -> Callable[..., TinyModel]:
    """Factory of tiny random Mistral models; see ``tiny_qwen2``."""
    return _factory("mistral", _trlcompat_folder)


def _factory(architecture: str, folder: Path) -> Callable[..., TinyModel]:
    def build(**sizes: Any) -> TinyModel:
        from pytest_trlcompat.tiny import TinyModel

        return TinyModel(architecture=architecture, **{"directory": folder, **sizes})

    return build


@pytest.fixture(scope="session")
def _trlcompat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models of this session are saved."""
    return tmp_path_factory.mktemp("trlcompat")


@pytest.fixture
def prompts() -> Dataset:
    """A ``datasets.Dataset`` of 16 prompts that the tiny models' tokenizers know, in the column ``prompt``.

    ``pytest_trlcompat.tiny.prompts`` makes others.
    """
    from pytest_trlcompat import tiny

    return tiny.prompts()


@pytest.fixture(scope="session")
def launcher(pytestconfig: pytest.Config) -> Iterator[Launcher]:
    """Runs a function on N ranks: ``launcher(fn, *args, strategy="zero3", world_size=2, timeout=60, **kwargs)``.

    Returns one result per rank (``.values``). Strategies are single, ddp, zero1, zero2, zero3, fsdp1 and fsdp2. The
    first launch of a session imports the stack, later ones take about a second.
    """
    from pytest_trlcompat.launch import Cluster, ClusterError, Launcher

    device = pytestconfig.stash[_DEVICE].name
    if device == "software":
        _build_accelerator(pytestconfig)
    values = pytestconfig.stash[settings.KEY]
    try:
        cluster = Cluster(values.nnodes.value, values.node_rank.value, values.rdzv_endpoint.value)
    except ClusterError as error:
        raise pytest.UsageError(f"trlcompat: {error}") from error
    with Launcher(device=device, timeout=values.timeout.value, cluster=cluster) as launch:
        yield launch


def _build_accelerator(config: pytest.Config) -> None:
    """Compile it where nobody has yet, with its progress line on the terminal and one message where it fails."""
    from pytest_trlcompat import accelerator

    capture = config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            accelerator.build()
    except accelerator.AcceleratorError as error:
        if config.stash[settings.KEY].results.value is not None:
            # A sweep that can measure nothing must not leave a cell full of errors.
            pytest.exit(f"trlcompat: {error}", returncode=pytest.ExitCode.USAGE_ERROR)
        raise pytest.fail.Exception(f"trlcompat: {error}", pytrace=False) from None


@pytest.fixture(scope="session")
def ddp_launcher(launcher: Launcher) -> Callable[..., LaunchResult]:
    """Runs a function under DistributedDataParallel: ``ddp_launcher(fn, *args, world_size=2, **kwargs)``."""

    def launch(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> LaunchResult:
        return launcher(function, *args, strategy="ddp", **kwargs)

    return launch


@pytest.fixture(scope="session")
def deepspeed_launcher(launcher: Launcher) -> Callable[..., LaunchResult]:
    """Runs a function under DeepSpeed ZeRO: ``deepspeed_launcher(fn, *args, stage=3, world_size=2, **kwargs)``.

    ``stage`` is 1, 2 or 3; ``options`` are merged into the DeepSpeed configuration.
    """

    def launch(function: Callable[..., Any], /, *args: Any, stage: int = 3, **kwargs: Any) -> LaunchResult:
        return launcher(function, *args, strategy=_numbered("zero", "stage", stage, (1, 2, 3)), **kwargs)

    return launch


@pytest.fixture(scope="session")
def fsdp_launcher(launcher: Launcher) -> Callable[..., LaunchResult]:
    """Runs a function under FSDP: ``fsdp_launcher(fn, *args, version=1, world_size=2, **kwargs)``.

    ``version`` is 1 or 2; ``options`` are Accelerate's FSDP settings (``sharding_strategy="NO_SHARD"``).
    """

    def launch(function: Callable[..., Any], /, *args: Any, version: int = 1, **kwargs: Any) -> LaunchResult:
        return launcher(function, *args, strategy=_numbered("fsdp", "version", version, (1, 2)), **kwargs)

    return launch


def _numbered(name: str, what: str, number: int, known: tuple[int, ...]) -> str:
    if number not in known:
        raise ValueError(f"{what}={number!r}; choose one of {', '.join(map(str, known))}")
    return f"{name}{number}"


@pytest.fixture(scope="session")
def version_matrix() -> VersionMatrix:
    """The stack's installed versions, the cells of the version matrix, and ``version_matrix.holds(trl=">=0.15")``."""
    from pytest_trlcompat.versions import VersionMatrix

    return VersionMatrix(stack.installed())


@pytest.fixture
def judge(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Judge:
    """Judges what a suite measured: ``judge(measure, subject=..., strategy=...)``.

    For tests with the marker ``known_issue``. The verdict is compared with the catalogue's prediction and appended to
    ``--trlcompat-results``.
    """
    from pytest_trlcompat import catalog
    from pytest_trlcompat.judge import Judge

    issue_id = known_issues.issue_of(request.node)
    if issue_id is None:
        raise pytest.UsageError(f"{request.node.nodeid}: fixture judge needs @pytest.mark.known_issue(id)")
    values = pytestconfig.stash[settings.KEY]
    return Judge(
        issue=catalog.load().get_issue(issue_id),
        results=values.results.value,
        resume=values.resume.value,
        properties=request.node.user_properties,
    )
