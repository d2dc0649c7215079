"""The plugin's fixtures. They import the packages that they need when they are used, since most runs use few."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.plugin import preloading, selection, settings
from pytest_trlcompat.plugin.strategies import StrategyLauncher, skip_reason

if TYPE_CHECKING:
    from datasets import Dataset

    from pytest_trlcompat.inference.server import VLLMServer
    from pytest_trlcompat.launch import Launcher, LaunchResult
    from pytest_trlcompat.plugin.judging import Judge
    from pytest_trlcompat.plugin.versions import VersionMatrix
    from pytest_trlcompat.tiny import TinyModel

__all__ = [
    "_trlcompat_folder",
    "assert_equivalent",
    "conversations",
    "ddp_launcher",
    "deepspeed_launcher",
    "fsdp_launcher",
    "judge",
    "launcher",
    "preferences",
    "prompts",
    "strategy_launcher",
    "tiny_gemma",
    "tiny_llama",
    "tiny_mistral",
    "tiny_moe",
    "tiny_qwen2",
    "tiny_vlm",
    "unpaired_preferences",
    "version_matrix",
    "vllm_server",
]


@pytest.fixture(scope="session")
def tiny_qwen2(_trlcompat_folder: Path) -> Callable[..., TinyModel]:
    """Factory of tiny random Qwen2 models: ``tiny_qwen2(seed=0, vocab_size=64, ...)``.

    The model has ``.model``, ``.tokenizer``, ``.config`` and ``.path``, a folder for ``from_pretrained`` that must not
    be modified, since equal models of a session share it. The same seed gives bitwise equal weights in every process.
    Skips the test where the installed Transformers has no such architecture.
    """
    return _factory("qwen2", _trlcompat_folder)


@pytest.fixture(scope="session")
def tiny_mistral(_trlcompat_folder: Path) -> Callable[..., TinyModel]:
    """Factory of tiny random Mistral models; see ``tiny_qwen2``."""
    return _factory("mistral", _trlcompat_folder)


@pytest.fixture(scope="session")
def tiny_llama(_trlcompat_folder: Path) -> Callable[..., TinyModel]:
    """Factory of tiny random Llama models; see ``tiny_qwen2``."""
    return _factory("llama", _trlcompat_folder)


@pytest.fixture(scope="session")
def tiny_gemma(_trlcompat_folder: Path) -> Callable[..., TinyModel]:
    """Factory of tiny random Gemma models, whose embeddings are tied; see ``tiny_qwen2``."""
    return _factory("gemma", _trlcompat_folder)


@pytest.fixture(scope="session")
def tiny_moe(_trlcompat_folder: Path) -> Callable[..., TinyModel]:
    """Factory of tiny random mixtures of experts, Qwen3-MoE (Transformers 4.51 or later); see ``tiny_qwen2``.

    ``num_experts`` and ``num_experts_per_tok`` are sizes of it, too.
    """
    return _factory("moe", _trlcompat_folder)


@pytest.fixture(scope="session")
def tiny_vlm(_trlcompat_folder: Path) -> Callable[..., TinyModel]:
    """Factory of tiny random vision models, Qwen2-VL (Transformers 4.45 or later); see ``tiny_qwen2``.

    Its ``.processor`` takes images; it needs Pillow, and, to take videos, torchvision. The model does not.
    """
    return _factory("vlm", _trlcompat_folder)


def _factory(name: str, folder: Path) -> Callable[..., TinyModel]:
    def build(**sizes: Any) -> TinyModel:
        from pytest_trlcompat import tiny

        model: TinyModel = getattr(tiny, name)(**{"directory": folder, **sizes})
        try:
            model.check_present()
        except tiny.ArchitectureAbsent as error:
            pytest.skip(str(error))
        return model

    return build


@pytest.fixture(scope="session")
def _trlcompat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the tiny models of this session are saved."""
    return tmp_path_factory.mktemp("trlcompat")


@pytest.fixture
def prompts() -> Dataset:
    """A ``datasets.Dataset`` of 16 prompts in the vocabulary of the tiny models, in the column ``prompt``.

    ``pytest_trlcompat.tiny.prompts`` creates others.
    """
    from pytest_trlcompat import tiny

    return tiny.prompts()


@pytest.fixture
def conversations() -> Dataset:
    """A ``datasets.Dataset`` of 16 conversations of one or two turns, in the column ``messages``, as SFT takes them.

    ``pytest_trlcompat.tiny.conversations`` creates others.
    """
    from pytest_trlcompat import tiny

    return tiny.conversations()


@pytest.fixture
def preferences() -> Dataset:
    """A ``datasets.Dataset`` of 16 rows with ``prompt``, ``chosen`` and ``rejected``, as DPO and reward models take
    them.

    ``pytest_trlcompat.tiny.preferences`` creates others, conversational ones too.
    """
    from pytest_trlcompat import tiny

    return tiny.preferences()


@pytest.fixture
def unpaired_preferences() -> Dataset:
    """A ``datasets.Dataset`` of 16 rows with ``prompt``, ``completion`` and ``label``, half of them liked, as KTO takes
    them.

    ``pytest_trlcompat.tiny.unpaired_preferences`` creates others, conversational ones too.
    """
    from pytest_trlcompat import tiny

    return tiny.unpaired_preferences()


@pytest.fixture(scope="session")
def launcher(pytestconfig: pytest.Config) -> Iterator[Launcher]:
    """Runs a function on N ranks: ``launcher(fn, *args, strategy="zero3", world_size=2, timeout=60, **kwargs)``.

    Returns one result per rank (``.values``). Strategies are those of ``pytest_trlcompat.launch.NAMES``. The first
    launch of a session imports the stack, later ones take about a second.
    """
    from pytest_trlcompat.launch import Cluster, ClusterError, Launcher
    from pytest_trlcompat.launch.cluster import SECRET_VARIABLE
    from pytest_trlcompat.plugin.debugging import lender
    from pytest_trlcompat.plugin.relaying import Relay, is_live

    device = pytestconfig.stash[settings.DEVICE_KEY].name
    if device == "software":
        _build_accelerator(pytestconfig)
    values = pytestconfig.stash[settings.KEY]
    try:
        secret = os.environ.get(SECRET_VARIABLE)
        cluster = Cluster(values.nnodes.value, values.node_rank.value, values.rdzv_endpoint.value, secret)
    except ClusterError as error:
        raise pytest.UsageError(f"trlcompat: {error}") from error
    live, debugged = is_live(pytestconfig), values.debug_rank
    with Launcher(
        device=device,
        timeout=values.timeout.value,
        cluster=cluster,
        relay=Relay(pytestconfig, live),
        live=live,
        debug=None if debugged.value is None else lender(pytestconfig, debugged.value, debugged.where),
        preload=values.preload.value,
    ) as launch:
        yield launch
        if values.preload.value:
            preloading.remember(pytestconfig, launch.preloaded)


@pytest.fixture(scope="session")
def vllm_server(pytestconfig: pytest.Config, launcher: Launcher) -> Iterator[Callable[..., VLLMServer]]:
    """Factory of vLLM servers: ``vllm_server(tiny_qwen2(hidden_size=128), max_model_len=64)``.

    A server is TRL's own (``trl vllm-serve``), on this machine's CPU. Its ``.url`` is for ``vllm_server_base_url`` of a
    trainer with ``vllm_mode="server"`` that runs on the software accelerator. It takes half a minute to start; equal
    models with equal options share one until the session ends; ``trl`` is a folder with another release of TRL to serve
    by. Skips the test where vLLM is not installed, and on
    another device.
    """
    from pytest_trlcompat.inference.server import ServerError, VLLMServer
    from pytest_trlcompat.launch.cluster import Cluster
    from pytest_trlcompat.launch.environment import base_environment

    servers: dict[str, VLLMServer] = {}
    failed: dict[str, ServerError] = {}
    device = pytestconfig.stash[settings.DEVICE_KEY].name

    def serve(model: TinyModel, trl: str | None = None, **options: str | int | float) -> VLLMServer:
        if "vllm" not in stack.installed():
            pytest.skip("vLLM is not installed")
        if device != "software":
            pytest.skip(f"a vLLM server is for trainings on the software accelerator, and these are on {device}")
        path = launcher(_saved, model, strategy="single").values[0]
        key = repr((path, trl, sorted(options.items())))
        known = servers.get(key)
        if known is None or not known.running:
            if known is not None:
                known.stop()
            # To start one takes half a minute, and the next try would fail in the same way.
            if key in failed:
                raise failed[key]
            try:
                server = VLLMServer(path, base_environment(device, Cluster()), options, trl)
            except ServerError as error:
                failed[key] = error
                raise
            exits.callback(server.stop)
            servers[key] = server
        return servers[key]

    with contextlib.ExitStack() as exits:
        yield serve


def _saved(model: TinyModel) -> str:
    """In a rank: save the model, and return its folder."""
    return str(model.path)


def _build_accelerator(config: pytest.Config) -> None:
    """Compile it if necessary, with a progress line on the terminal, and one message if that fails."""
    from pytest_trlcompat import accelerator

    capture = config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            accelerator.build()
    except accelerator.AcceleratorError as error:
        if config.stash[settings.KEY].results.value is not None:
            # A sweep that cannot measure anything must not record an error for every suite.
            pytest.exit(f"trlcompat: {error}", returncode=pytest.ExitCode.USAGE_ERROR)
        raise pytest.fail.Exception(f"trlcompat: {error}", pytrace=False) from None


@pytest.fixture(scope="session")
def ddp_launcher(launcher: Launcher) -> Callable[..., LaunchResult]:
    """Runs a function under DistributedDataParallel: ``ddp_launcher(fn, *args, world_size=2, **kwargs)``."""

    def launch(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> LaunchResult:
        __tracebackhide__ = True
        return launcher(function, *args, strategy="ddp", **kwargs)

    return launch


@pytest.fixture(scope="session")
def deepspeed_launcher(launcher: Launcher) -> Callable[..., LaunchResult]:
    """Runs a function under DeepSpeed ZeRO: ``deepspeed_launcher(fn, *args, stage=3, world_size=2, **kwargs)``.

    ``stage`` is 1, 2 or 3; ``options`` are merged into the DeepSpeed configuration.
    """

    def launch(function: Callable[..., Any], /, *args: Any, stage: int = 3, **kwargs: Any) -> LaunchResult:
        __tracebackhide__ = True
        return launcher(function, *args, strategy=_numbered("zero", "stage", stage, (1, 2, 3)), **kwargs)

    return launch


@pytest.fixture(scope="session")
def fsdp_launcher(launcher: Launcher) -> Callable[..., LaunchResult]:
    """Runs a function under FSDP: ``fsdp_launcher(fn, *args, version=1, world_size=2, **kwargs)``.

    ``version`` is 1 or 2; ``options`` are Accelerate's FSDP settings (``sharding_strategy="NO_SHARD"``).
    """

    def launch(function: Callable[..., Any], /, *args: Any, version: int = 1, **kwargs: Any) -> LaunchResult:
        __tracebackhide__ = True
        return launcher(function, *args, strategy=_numbered("fsdp", "version", version, (1, 2)), **kwargs)

    return launch


@pytest.fixture
def strategy_launcher(request: pytest.FixtureRequest) -> StrategyLauncher:
    """Runs a function under each strategy of the marker ``strategies``: ``strategy_launcher(fn, *args, world_size=2)``.

    Its ``.strategy`` is the name. The test is skipped, with the reason, under a strategy that the installed stack does
    not have.
    """
    reason = skip_reason(request.param)
    if reason is not None:
        pytest.skip(reason)
    return StrategyLauncher(request.getfixturevalue("launcher"), request.param)


@pytest.fixture
def assert_equivalent(launcher: Launcher) -> Callable[..., None]:
    """Asserts that a training is the same under strategies: ``assert_equivalent(train, *args, strategies=["zero3"])``.

    Rows, losses, gradient norms and weights are compared with those in one process; the error names what differs first.
    ``tolerance`` is measured unless it is given; ``world_size`` is 2.
    """
    from pytest_trlcompat import equivalence

    return functools.partial(equivalence.assert_equivalent, launcher)


def _numbered(name: str, what: str, number: int, known: tuple[int, ...]) -> str:
    if number not in known:
        raise ValueError(f"{what}={number!r}; choose one of {', '.join(map(str, known))}")
    return f"{name}{number}"


@pytest.fixture(scope="session")
def version_matrix() -> VersionMatrix:
    """The stack's installed versions, the cells of the version matrix, and ``version_matrix.holds(trl=">=0.15")``."""
    from pytest_trlcompat.plugin.versions import VersionMatrix

    return VersionMatrix(stack.installed())


@pytest.fixture
def judge(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Judge:
    """Judges a suite's measurement: ``judge(measure, subject=..., strategy=...)``.

    For tests with the marker ``known_issue``. The verdict is compared with the catalogue's prediction and appended to
    ``--trlcompat-results``.
    """
    from pytest_trlcompat.catalog import known_issues
    from pytest_trlcompat.plugin.judging import Judge

    issue_id = selection.issue_of(request.node)
    if issue_id is None:
        raise pytest.UsageError(f"{request.node.nodeid}: fixture judge needs @pytest.mark.known_issue(id)")
    values = pytestconfig.stash[settings.KEY]
    return Judge(
        issue=known_issues.load().get_issue(issue_id),
        results=values.results.value,
        resume=values.resume.value,
        properties=request.node.user_properties,
    )
