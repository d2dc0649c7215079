"""One training with vLLM per trainer, subject and label, shared by the suites that judge it.

Runs in the test process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.inference.recording_engine import is_recording
from pytest_trlcompat.inference.server import ServerError
from pytest_trlcompat.plugin.judging import Absent, Untestable
from pytest_trlcompat.tiny import ArchitectureAbsent

from ..in_rank import models, vllm_images, vllm_training
from ..launches import distinct
from ..sharding.trainings import built_as_asked
from .server_faults import GENERATES, TAKES_WEIGHTS, lost_on_request, proxied

if TYPE_CHECKING:
    from pytest_trlcompat.inference.server import VLLMServer
    from pytest_trlcompat.launch import LaunchResult
    from pytest_trlcompat.tiny import TinyModel

__all__ = [
    "LABELS",
    "SERVER_LABELS",
    "TRAINERS",
    "VLLMTraining",
    "VLLMTrainings",
    "measurements",
    "of_architecture",
    "sizes",
]

TRAINERS = {"grpo": "GRPO", "rloo": "RLOO", "distillation": "Distillation"}
"""Those that generate with vLLM, by how the ids of their issues begin."""

LABELS = (
    "single",
    *("single-tied", "single-lora", "single-lora_bf16", "single-whole"),
    *("single-reuse", "single-accumulated", "single-resumed"),
    "ddp",
    "zero2",
    "zero2-lora",
    "zero3",
    "zero3-lora",
    "fsdp1",
    "fsdp1-lora",
    "fsdp2",
    "fsdp2-lora",
)
"""A strategy and, behind it, the variant of the training; the engine is in the rank's own process."""
SERVER_LABELS = (
    "single-server",
    "single-server_lora",
    "single-server_whole",
    "ddp-server",
    "zero2-server",
    "zero3-server",
    "zero3-server_lora",
    "fsdp1-server",
    "fsdp1-server_lora",
    "fsdp2-server",
    "fsdp2-server_lora",
)
"""The same where the engine is a server."""
OWN_ENGINE = ("zero3-whole", "fsdp1-tied", "fsdp2-whole")
"""Labels that are measured with vLLM's own engine alone, beside those of :func:`vllm_training.needs_own_engine`."""
RELEASES = "TRLCOMPAT_SERVER_RELEASES"
"""A variable that names a folder, in which each release of TRL has one by the name of its requirement."""
_LAYERS = 12
"""Of a model of which one layer is a small part."""
_LATE, _LATE_WEIGHTS, _SILENT = 3.0, 0.1, 5.0
"""Seconds by which completions, and each answer about weights, are late, and in which nobody answers at first."""
_TIMEOUT = 400.0
"""Seconds of a launch: TRL's client asks a server that is gone for a minute, and one that restarts takes another."""


def measurements(*kinds: str) -> list[Any]:
    """Trainer and label of each measurement of the issues ``<trainer>-vllm-<kind>``, of all trainers that have them.

    Which labels an issue is measured under is in the catalogue.
    """
    return [
        pytest.param(name, label, marks=pytest.mark.known_issue(issue.id), id=f"{issue.id}-{label}")
        for kind in kinds
        for prefix, name in TRAINERS.items()
        if (issue := load().get(f"{prefix}-vllm-{kind}")) is not None
        for label in issue.strategies
    ]


def sizes(variant: str) -> dict[str, Any]:
    """Of the tiny model: vLLM's attention on a CPU takes heads of 32 and more."""
    model = vllm_training.model_of(variant)
    return {
        "hidden_size": 128,
        "initializer_range": 0.1,
        "num_hidden_layers": _LAYERS if vllm_training.is_deep(variant) else 1,
        "tie_word_embeddings": model == "tied",
        **({"vocab_size": vllm_images.VOCABULARY} if model == "vision" else {}),
    }


def of_architecture(model: TinyModel, variant: str) -> TinyModel:
    """A tiny Qwen2 of these sizes, or the model of another architecture that the variant is about in its place."""
    architecture = {"moe": "qwen3_moe", "vision": "qwen2_vl"}.get(vllm_training.model_of(variant))
    return model if architecture is None else replace(model, architecture=architecture)


@dataclass(frozen=True)
class VLLMTraining:
    """What the ranks measured; see :func:`vllm_training.train`.

    Attributes:
        server_said: the last error that a server printed, where a training failed.
        passed_on: what was done to requests on their way to the server; see :class:`.server_faults.Proxy`.
    """

    ranks: Sequence[Mapping[str, Any]]
    server_said: str = ""
    passed_on: Mapping[str, int] = field(default_factory=dict)

    @property
    def failure(self) -> str | None:
        """What a rank failed with, if one did."""
        return next(iter(distinct(rank["failure"] for rank in self.ranks)), None)

    def evidence(self) -> dict[str, Any]:
        """What every suite says: which engine measured, and the seconds that it took."""
        first = self.ranks[0]
        spent = [synchronisation["seconds"] for synchronisation in first["synchronisations"]]
        return {
            "engine": {"vllm": stack.installed()["vllm"], **first["engine"]},
            "seconds_to_build": round(first["seconds"].get("build", 0.0), 2),
            "seconds_of_synchronisations": [round(seconds, 4) for seconds in spent],
            **self.passed_on,
            **({"failure": self.failure} if self.failure else {}),
            # No failure of the training's own, which a known issue would have to explain.
            **({"server": f"the last error that it printed: {self.server_said}"} if self.server_said else {}),
        }


@dataclass(frozen=True)
class VLLMTrainings:
    """Trains for a subject and label, with GRPO or another trainer.

    Attributes:
        launch: makes each launch once.
        build: a tiny model of these sizes.
        folder: below which each training that is resumed has a folder of its own.
        serve: a server of a model; see the fixture ``vllm_server``.
    """

    launch: Callable[..., LaunchResult]
    build: Callable[..., TinyModel]
    folder: Path
    serve: Callable[..., VLLMServer]

    def __call__(self, subject: str, label: str, trainer: str = "GRPO") -> VLLMTraining:
        """
        Args:
            trainer: see :func:`grpo.trainer_class`.

        Raises:
            Absent: this release of TRL has no such training with vLLM.
            Untestable: vLLM is not installed, or this release of it cannot take new weights on a CPU.
        """
        if "vllm" not in stack.installed():
            raise Untestable("vLLM is not installed; cells that have it are run by: nox -s matrix -- --vllm")
        strategy, _, variant = label.partition("-")
        _check_present(trainer, variant)
        needs_own_engine = label in OWN_ENGINE or vllm_training.needs_own_engine(variant)
        if needs_own_engine and is_recording(stack.installed()):
            raise Untestable("this is measured with vLLM's own engine alone")
        model = self._model(variant)
        self.launch(models.save_model, model, strategy="single")
        server = self._server(model, variant) if vllm_training.has_server(variant) else None
        folder = self.folder / f"{subject}-{trainer}-{label}"
        folder.mkdir(exist_ok=True)

        def train(resume: bool, url: str | None = None) -> LaunchResult:
            arguments = (subject, model, variant, str(folder), resume, url, trainer)
            return self.launch(vllm_training.train, *arguments, strategy=strategy, sharded=False, timeout=_TIMEOUT)

        # By another process: TRL leaves the variables of a distributed training in the first.
        if variant == "resumed":
            train(False)
        with _way(server, variant, folder) as way:
            result = train(variant == "resumed", way.url)
        training = VLLMTraining(result.values, passed_on=way.passed_on)
        if training.failure and server is not None:
            training = replace(training, server_said=_last_error(server.output()))
            # It may have lost its engine, or wait for weights; the next training gets another one.
            server.kill()
        built_as_asked(strategy, {}, training.failure)
        engine = training.ranks[0]["engine"]
        missing = [*engine["missing"], *(engine["missing_experts"] if vllm_training.model_of(variant) == "moe" else [])]
        if missing:
            version = stack.installed()["vllm"]
            raise Untestable(f"vLLM {version} has no {', '.join(missing)}, so that its weights stay packed")
        return training

    def _model(self, variant: str) -> TinyModel:
        model = of_architecture(self.build(**sizes(variant)), variant)
        try:
            model.check_present()
        except ArchitectureAbsent as error:
            raise Absent(str(error)) from error
        return model

    def _server(self, model: TinyModel, variant: str) -> VLLMServer:
        release = vllm_training.serving_release(variant)
        try:
            if release:
                return self.serve(model, trl=_folder_of(release), max_model_len=vllm_training.MAX_LENGTH)
            return self.serve(model, max_model_len=vllm_training.max_length(variant))
        except ServerError as error:
            raise Untestable(str(error)) from error


def _last_error(output: str) -> str:
    errors = re.findall(r"^\w+(?:\.\w+)*(?:Error|Exception)\b.*$", output, re.MULTILINE)
    return errors[-1][:300] if errors else ""


def _check_present(trainer: str, variant: str) -> None:
    """
    Raises:
        Absent: the installed release of TRL has none.
        Untestable: this engine does not sleep.
    """
    versions = stack.installed()
    is_server = vllm_training.has_server(variant)
    for applies, text, reason in (
        (trainer == "RLOO", "<0.22", "RLOO generates with vLLM from trl 0.22.0 on"),
        (trainer == "Distillation", "<1.10", "the trainer is experimental until 1.9"),
        (is_server, "<0.16", "GRPO asks a vLLM server from trl 0.16.0 on"),
        (not is_server, ">=0.16,<0.18", "GRPO has vLLM's engine in its own processes before trl 0.16 and from 0.18 on"),
        (vllm_training.sleeps(variant), "<0.23", "an engine can sleep from trl 0.23.0 on"),
        (variant == "reuse", "<0.16", "GRPO uses a batch more than once from trl 0.16.0 on"),
    ):
        if applies and stack.satisfied({"trl": text}, versions):
            raise Absent(reason)
    if variant == "parallel" and not is_recording(versions) and stack.satisfied({"vllm": "<0.25"}, versions):
        raise Untestable("on a CPU this vLLM has tensor parallelism in processes of its own alone, not in ranks")
    if vllm_training.model_of(variant) == "vision" and "torchvision" not in versions and not is_recording(versions):
        raise Untestable("vLLM's vision models import torchvision, which is not installed here")
    if vllm_training.sleeps(variant) and not is_recording(versions):
        raise Untestable("vLLM releases the memory of GPUs alone; the recording engine in its place sleeps here")


def _folder_of(release: str) -> str:
    """
    Raises:
        Untestable: nobody has provided it.
    """
    folder = Path(os.environ.get(RELEASES, ""), f"trl=={release}")
    if not os.environ.get(RELEASES) or not folder.is_dir():
        raise Untestable(f"trl {release} is not in the folder of ${RELEASES}; run: nox -s server_releases")
    return str(folder)


@dataclass
class _Way:
    """How a training reaches its server.

    Attributes:
        url: for the trainer; ``None`` where its engine is in its own process.
        passed_on: at the end, what was done to requests.
    """

    url: str | None = None
    passed_on: Mapping[str, int] = field(default_factory=dict)


@contextmanager
def _way(server: VLLMServer | None, variant: str, folder: Path) -> Iterator[_Way]:
    """Within the block what the variant says happens to the server, or to requests on their way."""
    if server is None:
        yield _Way()
        return
    asked: Mapping[str, Mapping[str, Any]] = {
        "server_late": {"late": _seconds},
        "server_late_start": {"silent": _SILENT},
        "server_restarted_answering": {"restart": server.restart},
    }
    if variant in asked:
        with proxied(server.url, **asked[variant]) as proxy:
            way = _Way(proxy.url)
            yield way
            way.passed_on = {name: getattr(proxy, name) for name in ("late_answers", "unanswered", "handed_over")}
    elif vllm_training.loses_server(variant):
        with lost_on_request(folder, server.kill if variant == "server_ended" else server.restart):
            yield _Way(server.url)
    else:
        yield _Way(server.url)


def _seconds(path: str) -> float:
    if path.startswith(GENERATES):
        return _LATE
    return _LATE_WEIGHTS if path.startswith(TAKES_WEIGHTS) else 0.0
