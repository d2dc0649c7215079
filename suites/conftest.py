"""What all suites share: the subject, and a tiny model that lies on disk."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat._devices import visible_gpus
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import measured_with
from pytest_trlcompat.catalog.verdict import Record
from pytest_trlcompat.conformance.training import conformance_model
from pytest_trlcompat.matrix.suite_choice import NOT_DEFAULT, ONLY_NEWEST, ONLY_OLDER, PARTS, PARTS_OF_NEWEST, parts_of
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge, Untestable

from .adapters.trainings import AdapterTrainings, with_every_failure
from .conformance.trainings import ConformanceTrainings
from .in_rank import adapters, grpo_trainings, models
from .launch_groups import group_of
from .launches import LaunchCache, Turns
from .ppo.runs import PPORuns
from .settings.trainings import SettingTrainings
from .sharding import trainings
from .vllm.trainings import VLLMTrainings

if TYPE_CHECKING:
    from pytest_trlcompat.inference.server import VLLMServer
    from pytest_trlcompat.launch import Launcher, LaunchResult
    from pytest_trlcompat.tiny import TinyModel


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_pair: left out of a sweep of the default cells, and part of a full one")
    config.addinivalue_line("markers", "on_demand: part of a sweep with --issue alone")
    for part in PARTS:
        config.addinivalue_line("markers", f"{part}: run in the default cells of this part; see matrix.suite_choice")
    config.addinivalue_line("markers", f"{NOT_DEFAULT}: left out of the default cells, and part of any other")
    config.addinivalue_line("markers", f"{ONLY_NEWEST}: left out of the older default cells; see matrix.suite_choice")
    config.addinivalue_line("markers", f"{ONLY_OLDER}: left out of the newest default cell; see matrix.suite_choice")
    config.addinivalue_line(
        "markers", "launch_group(name): tests that judge the same launches, in one process of a sweep"
    )
    config.addinivalue_line("markers", "vllm: needs vLLM; part of a sweep with --vllm alone")
    config.addinivalue_line("markers", "liger: needs Liger; part of a sweep with --liger alone")
    config.addinivalue_line("markers", "images: needs Pillow; part of a sweep with --images alone")


# Before pytest selects by -m, which goes by these markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test of the suites with the parts in which it is run, those of conformance aside, which have theirs."""
    catalog = known_issues.load()
    for item in (test for test in items if test.path.is_relative_to(Path(__file__).parent)):
        item.add_marker(pytest.mark.launch_group(group_of(item)))
        named = item.get_closest_marker("known_issue")
        values = getattr(getattr(item, "callspec", None), "params", {})
        if any(item.get_closest_marker(part) for part in PARTS):
            in_newest = any(item.get_closest_marker(part) for part in PARTS_OF_NEWEST)
            if values.get("subject") == "corrected" and not in_newest:
                item.add_marker(ONLY_OLDER)
            continue
        if named is None:
            raise pytest.UsageError(f"{item.nodeid} is of no known issue")
        labels = catalog[named.args[0]].strategies
        label = next((value for value in values.values() if isinstance(value, str) and value in labels), None)
        for part in parts_of(named.args[0], label, item.path.parent.name):
            item.add_marker(part)


_NOT_IN_ALL = ("grpo", "distillation")
"""Trainers that are in a file of their own, which not every release of TRL has."""


class _WithoutTrainer(Judge):
    """Finds every suite absent that measures with a trainer which TRL lacks, and launches nothing for it."""

    def __call__(self, measure: Callable[[], Finding], *, subject: str, strategy: str) -> Record:
        return super().__call__(self._absent, subject=subject, strategy=strategy)

    def _absent(self) -> Finding:
        raise Absent(f"this release of TRL has no {_file_of(measured_with(self.issue.id))}")


class _OnOneGPU(Judge):
    """Measures in one process alone: what suites measure under a strategy needs two ranks, hence two GPUs."""

    def __call__(self, measure: Callable[[], Finding], *, subject: str, strategy: str) -> Record:
        alone = strategy.partition("-")[0] == "single"
        return super().__call__(measure if alone else _no_second_gpu, subject=subject, strategy=strategy)


def _no_second_gpu() -> Finding:
    raise Untestable(
        "the suites measure strategies with two ranks, each on a GPU of its own, and this machine has one; "
        "ask for the software accelerator with --trlcompat-device software"
    )


@pytest.fixture
def judge(judge: Judge, launcher: Launcher) -> Judge:
    """The plugin's; where TRL lacks the trainer, one that finds suites absent; and see :class:`_OnOneGPU`."""
    if measured_with(judge.issue.id) in _NOT_IN_ALL and not _has(measured_with(judge.issue.id)):
        return _WithoutTrainer(**vars(judge))
    if launcher.device == "cuda" and visible_gpus() < 2:
        return _OnOneGPU(**vars(judge))
    return judge


def _file_of(trainer: str) -> str:
    return f"trl/trainer/{trainer}_trainer.py"


def _has(trainer: str) -> bool:
    """Whether the installed TRL has the file of a trainer."""
    # Among its files, since the test process imports nothing of the stack.
    trl = importlib.util.find_spec("trl")
    assert trl is not None, "the suites measure TRL, which is not installed"
    assert trl.submodule_search_locations, trl
    return any((Path(folder).parent / _file_of(trainer)).is_file() for folder in trl.submodule_search_locations)


@pytest.fixture(params=["upstream", "corrected"])
def subject(request: pytest.FixtureRequest) -> str:
    """Whose trainer runs: TRL's own, or the corrected one of this package."""
    return str(request.param)


@pytest.fixture(scope="session")
def launches(launcher: Launcher) -> LaunchCache:
    """Launches that several suites judge, each made once."""
    return LaunchCache(launcher)


@pytest.fixture(scope="session")
def saved_qwen2(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """A tiny Qwen2 of one layer whose folder was written by a rank, so that the test process imports no torch."""
    model = tiny_qwen2(num_hidden_layers=1)
    launcher(models.save_model, model, strategy="single")
    return model


@pytest.fixture(scope="session")
def layered_qwen2(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """Like :func:`saved_qwen2`, with two layers: what DeepSpeed hooks into it was first counted so."""
    model = tiny_qwen2()
    launcher(models.save_model, model, strategy="single")
    return model


@pytest.fixture(scope="session")
def deep_qwen2(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """Like :func:`saved_qwen2`, of twelve layers with nearly all parameters: one of them and all are far apart."""
    model = tiny_qwen2(num_hidden_layers=12, hidden_size=128, intermediate_size=512)
    launcher(models.save_model, model, strategy="single")
    return model


@pytest.fixture(scope="session")
def grpo_runs(launches: LaunchCache, saved_qwen2: TinyModel, layered_qwen2: TinyModel) -> Callable[..., LaunchResult]:
    """Trainings that several suites judge: ``grpo_runs(measure, subject, strategy, **arguments)``, each made once."""

    def run(measure: str, subject: str, strategy: str, **arguments: Any) -> LaunchResult:
        model = saved_qwen2 if measure == "resumed" else layered_qwen2  # hooks are counted in all others
        return launches(getattr(grpo_trainings, measure), subject, model, strategy=strategy, **arguments)

    return run


@pytest.fixture(scope="session")
def lora_runs(launches: LaunchCache, saved_qwen2: TinyModel) -> Callable[[str, str], dict[str, Any]]:
    """What the first rank measured, by variant, for a subject and a label of :data:`adapters.VARIANTS`.

    ``failure`` is that of any rank, and ``failures_of_other_ranks`` are there where others failed differently. One
    launch for all labels of a strategy.
    """

    def run(subject: str, label: str) -> dict[str, Any]:
        strategy = label.partition("-")[0]
        groups = {
            name: group
            for name, group in adapters.VARIANTS.items()
            if name.partition("-")[0] == strategy and (subject == "corrected" or name not in adapters.IN_ONE_PROCESS)
        }
        # By their settings, since labels share trainings. Those in bf16 last: it stays on for the whole process,
        # in the variable that Transformers sets and in Accelerate's state.
        trainings = sorted(
            (settings for group in groups.values() for settings in group.values()),
            key=lambda settings: "bf16" in settings,
        )
        variants = {repr(settings): settings for settings in trainings}

        turns = Turns(variants)
        for names in turns:
            launched = launches(
                *(adapters.lora_trainings, subject, saved_qwen2, {name: variants[name] for name in names}),
                strategy=strategy,
                sharded=False,
                check=False,
                raises="original",
            )
            turns.judge(launched)
        by_variant = {name: turns.tried[repr(settings)] for name, settings in adapters.VARIANTS[label].items()}
        for error in (training.error for training in by_variant.values() if training.error is not None):
            raise error
        return {name: with_every_failure(training.ranks) for name, training in by_variant.items()}

    return run


@pytest.fixture(scope="session")
def adapter_trainings(
    launches: LaunchCache, saved_qwen2: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> AdapterTrainings:
    """One training of an adapter per subject and strategy, saved and resumed, for all suites that ask for it."""
    return AdapterTrainings(launches, saved_qwen2, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session")
def sharp_qwen2(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """Like :func:`saved_qwen2`, with larger weights: its log-probabilities differ by one and more among tokens."""
    model = tiny_qwen2(initializer_range=0.2)
    launcher(models.save_model, model, strategy="single")
    return model


@pytest.fixture(scope="session")
def launch_once(launches: LaunchCache) -> Callable[..., list[Any]]:
    """Launch a body, and return what its ranks returned; the same launch is made once for all suites that ask for it.

    Several known issues show in the numbers of one launch, and each has a test of its own.
    """
    return lambda body, *args, **settings: launches(body, *args, **settings).values


@pytest.fixture(scope="session")
def saved_mistral(tiny_mistral: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """A tiny Mistral of one layer; see ``saved_qwen2``."""
    model = tiny_mistral(num_hidden_layers=1)
    launcher(models.save_model, model, strategy="single")
    return model


@pytest.fixture(scope="session")
def ppo_runs(saved_mistral: TinyModel, launches: LaunchCache, tmp_path_factory: pytest.TempPathFactory) -> PPORuns:
    """What happened to a PPO trainer from construction to the final save, once for each subject and strategy."""
    return PPORuns(launches, saved_mistral, tmp_path_factory.mktemp("ppo"))


@pytest.fixture(scope="session")
def trained(
    tiny_qwen2: Callable[..., TinyModel], launches: LaunchCache, tmp_path_factory: pytest.TempPathFactory
) -> trainings.Trainings:
    """One training per subject and strategy for all suites; weights large enough that each of them matters."""
    return trainings.Trainings(launches, tiny_qwen2(initializer_range=0.1), tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def setting_trainings(launches: LaunchCache, tmp_path_factory: pytest.TempPathFactory) -> SettingTrainings:
    """One training per subject and row of settings; weights large enough that each of them matters."""
    from pytest_trlcompat import tiny

    sizes: dict[str, Any] = {"initializer_range": 0.1, "directory": tmp_path_factory.mktemp("settings")}
    models: dict[str, Callable[[], TinyModel]] = {
        "": lambda: tiny.qwen2(**sizes),
        "tied": lambda: tiny.qwen2(tie_word_embeddings=True, **sizes),
        "moe": lambda: tiny.moe(**sizes),
        "vision": lambda: tiny.vlm(**sizes),
    }
    return SettingTrainings(launches, models)


@pytest.fixture(scope="session")
def vllm_trainings(
    launches: LaunchCache,
    tiny_qwen2: Callable[..., TinyModel],
    tmp_path_factory: pytest.TempPathFactory,
    vllm_server: Callable[..., VLLMServer],
) -> VLLMTrainings:
    """Training with vLLM, once per trainer, subject and label for all suites; weights so large that each matters."""
    return VLLMTrainings(launches, tiny_qwen2, tmp_path_factory.mktemp("vllm"), vllm_server)


@pytest.fixture(scope="session")
def conformance_trainings(launches: LaunchCache, tmp_path_factory: pytest.TempPathFactory) -> ConformanceTrainings:
    """Trainings with settings, each made once per subject."""
    return ConformanceTrainings(launches, conformance_model(tmp_path_factory.mktemp("conformance")))
