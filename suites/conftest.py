"""What all suites share: the subject, and a tiny model that lies on disk."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat._devices import visible_gpus
from pytest_trlcompat.catalog.verdict import Record
from pytest_trlcompat.launch import LaunchError
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge, Untestable

from . import grpo_measures, grpo_training_measures, lora_measures, sharing
from .lora_saving import AdapterTrainings
from .ppo_lives import PPOLives

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher, LaunchResult
    from pytest_trlcompat.tiny import TinyModel


class _WithoutGRPO(Judge):
    """Finds every suite absent that measures with GRPO, and launches nothing for it."""

    def __call__(self, measure: Callable[[], Finding], *, subject: str, strategy: str) -> Record:
        return super().__call__(_no_grpo, subject=subject, strategy=strategy)


def _no_grpo() -> Finding:
    raise Absent("this release of TRL has no trl/trainer/grpo_trainer.py")


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
    """The plugin's; where TRL has no GRPO, one that finds all suites but PPO's absent; and see :class:`_OnOneGPU`."""
    if judge.issue.trainer != "ppo" and not _has_grpo():
        return _WithoutGRPO(**vars(judge))
    if launcher.device == "cuda" and visible_gpus() < 2:
        return _OnOneGPU(**vars(judge))
    return judge


def _has_grpo() -> bool:
    """Looked up among TRL's files: the test process imports nothing of the stack."""
    trl = importlib.util.find_spec("trl")
    assert trl is not None, "the suites measure TRL, which is not installed"
    assert trl.submodule_search_locations, trl
    return any((Path(folder) / "trainer" / "grpo_trainer.py").is_file() for folder in trl.submodule_search_locations)


class _Once:
    """Makes each launch once; one that failed fails again for every suite that asks for it."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._known: dict[str, LaunchResult | LaunchError] = {}

    def __call__(self, body: Callable[..., Any], *args: Any, **settings: Any) -> LaunchResult:
        key = repr((body.__module__, body.__qualname__, args, sorted(settings.items())))
        if key not in self._known:
            try:
                self._known[key] = self._launcher(body, *args, **settings)
            except LaunchError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, LaunchError):
            raise found
        return found


@pytest.fixture(params=["upstream", "corrected"])
def subject(request: pytest.FixtureRequest) -> str:
    """Whose trainer runs: TRL's own, or the corrected one of this package."""
    return str(request.param)


@pytest.fixture(scope="session")
def saved_qwen2(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """A tiny Qwen2 of one layer whose folder was written by a rank, so that the test process imports no torch."""
    model = tiny_qwen2(num_hidden_layers=1)
    launcher(grpo_measures.save_model, model, strategy="single")
    return model


@pytest.fixture(scope="session")
def layered_qwen2(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """Like :func:`saved_qwen2`, with two layers: what DeepSpeed hooks into it was first counted so."""
    model = tiny_qwen2()
    launcher(grpo_measures.save_model, model, strategy="single")
    return model


@pytest.fixture(scope="session")
def grpo_runs(launcher: Launcher, saved_qwen2: TinyModel, layered_qwen2: TinyModel) -> Callable[..., LaunchResult]:
    """Trainings that several suites judge: ``grpo_runs(measure, subject, strategy, **arguments)``, each made once.

    A launch that failed fails again for every suite that asks for it.
    """
    once = _Once(launcher)

    def run(measure: str, subject: str, strategy: str, **arguments: Any) -> LaunchResult:
        model = saved_qwen2 if measure == "resumed" else layered_qwen2  # hooks are counted in all others
        return once(getattr(grpo_training_measures, measure), subject, model, strategy=strategy, **arguments)

    return run


@pytest.fixture(scope="session")
def lora_runs(launcher: Launcher, saved_qwen2: TinyModel) -> Callable[[str, str], dict[str, Any]]:
    """What the first rank measured, by variant, for a subject and a label of :data:`lora_measures.VARIANTS`.

    One launch for all labels of a strategy.
    """
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def run(subject: str, label: str) -> dict[str, Any]:
        strategy = label.partition("-")[0]
        if (subject, strategy) not in known:
            groups = {
                name: group
                for name, group in lora_measures.VARIANTS.items()
                if name.partition("-")[0] == strategy and (subject == "corrected" or name not in lora_measures.TRUTHS)
            }
            # By their settings, since labels share trainings. Those in bf16 last: it stays on for the whole process,
            # in the variable that Transformers sets and in Accelerate's state.
            made = sorted(
                (made for group in groups.values() for made in group.values()), key=lambda made: "bf16" in made
            )
            variants = {repr(settings): settings for settings in made}
            body = lora_measures.lora_trainings
            result = launcher(body, subject, saved_qwen2, variants, strategy=strategy, sharded=False)
            known[subject, strategy] = result.values[0]
        return {name: known[subject, strategy][repr(made)] for name, made in lora_measures.VARIANTS[label].items()}

    return run


@pytest.fixture(scope="session")
def adapter_trainings(
    launcher: Launcher, saved_qwen2: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> AdapterTrainings:
    """One training of an adapter per subject and strategy, saved and resumed, for all suites that ask for it."""
    return AdapterTrainings(_Once(launcher), saved_qwen2, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session")
def sharp_qwen2(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """Like :func:`saved_qwen2`, with larger weights: its log-probabilities differ by one and more among tokens."""
    model = tiny_qwen2(initializer_range=0.2)
    launcher(grpo_measures.save_model, model, strategy="single")
    return model


@pytest.fixture(scope="session")
def launch_once(launcher: Launcher) -> Callable[..., list[Any]]:
    """Launch a body, and return what its ranks returned; the same launch is made once for all suites that ask for it.

    Several known issues show in the numbers of one launch, and each has a suite of its own.
    """
    once = _Once(launcher)
    return lambda body, *args, **settings: once(body, *args, **settings).values


@pytest.fixture(scope="session")
def saved_mistral(tiny_mistral: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """A tiny Mistral of one layer; see ``saved_qwen2``."""
    model = tiny_mistral(num_hidden_layers=1)
    launcher(grpo_measures.save_model, model, strategy="single")
    return model


@pytest.fixture(scope="session")
def ppo_lives(saved_mistral: TinyModel, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> PPOLives:
    """What happened to a PPO trainer from construction to the final save, once for each subject and strategy."""
    return PPOLives(launcher, saved_mistral, tmp_path_factory)


@pytest.fixture(scope="session")
def trained(
    tiny_qwen2: Callable[..., TinyModel], launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> sharing.Trainings:
    """One training per subject and strategy for all suites; weights large enough that each of them matters."""
    return sharing.Trainings(launcher, tiny_qwen2(initializer_range=0.1), tmp_path_factory.mktemp("trained"))
