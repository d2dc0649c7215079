"""One GRPO training with vLLM per subject and label, shared by the suites that judge it.

Runs in the test process and imports nothing of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat import stack
from pytest_trlcompat.inference.server import ServerError
from pytest_trlcompat.plugin.judging import Untestable

from ..in_rank import models, vllm_training
from ..launches import distinct

if TYPE_CHECKING:
    from pytest_trlcompat.inference.server import VLLMServer
    from pytest_trlcompat.launch import LaunchResult
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["LABELS", "SERVER_LABELS", "VLLMTraining", "VLLMTrainings", "sizes"]

_SERVER = "server"
"""What names of variants begin with whose vLLM is a server."""
LABELS = (
    "single",
    *(f"single-{variant}" for variant in vllm_training.VARIANTS if variant and not variant.startswith(_SERVER)),
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


def sizes(variant: str) -> dict[str, Any]:
    """Of the tiny model: vLLM's attention on a CPU takes heads of 32 and more."""
    return {
        "hidden_size": 128,
        "initializer_range": 0.1,
        "num_hidden_layers": 1,
        "tie_word_embeddings": variant == "tied",
    }


@dataclass(frozen=True)
class VLLMTraining:
    """What the ranks measured; see :func:`vllm_training.train`."""

    ranks: Sequence[Mapping[str, Any]]

    @property
    def failure(self) -> str | None:
        """What a rank failed with, if one did."""
        return next(iter(distinct(rank["failure"] for rank in self.ranks)), None)

    def evidence(self) -> dict[str, Any]:
        """What every suite says: which engine measured, and the seconds that it took."""
        first = self.ranks[0]
        spent = [each["seconds"] for each in first["synchronisations"]]
        return {
            "engine": {"vllm": stack.installed()["vllm"], **first["engine"]},
            "seconds_to_build": round(first["seconds"].get("build", 0.0), 2),
            "seconds_of_synchronisations": [round(seconds, 4) for seconds in spent],
            **({"failure": self.failure} if self.failure else {}),
        }


@dataclass(frozen=True)
class VLLMTrainings:
    """Trains for a subject and label.

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

    def __call__(self, subject: str, label: str) -> VLLMTraining:
        """
        Raises:
            Untestable: vLLM is not installed, or this release of it cannot take new weights on a CPU.
        """
        if "vllm" not in stack.installed():
            raise Untestable("vLLM is not installed; cells that have it are run by: nox -s matrix -- --vllm")
        strategy, _, variant = label.partition("-")
        model = self.build(**sizes(variant))
        self.launch(models.save_model, model, strategy="single")
        more: tuple[Any, ...] = ()
        if variant == "resumed":  # by another process: TRL leaves the variables of a distributed training in the first
            folder = str(self.folder / f"{subject}-{label}")
            self.launch(vllm_training.train, subject, model, variant, folder, strategy=strategy, sharded=False)
            more = (folder, True)
        elif variant.startswith(_SERVER):
            more = (None, False, self._server(model))
        result = self.launch(vllm_training.train, subject, model, variant, *more, strategy=strategy, sharded=False)
        training = VLLMTraining(result.values)
        missing = training.ranks[0]["engine"]["missing"]
        if missing:
            version = stack.installed()["vllm"]
            raise Untestable(f"vLLM {version} has no {', '.join(missing)}, so that its weights stay packed")
        return training

    def _server(self, model: TinyModel) -> str:
        try:
            return self.serve(model, max_model_len=vllm_training.MAX_LENGTH).url
        except ServerError as error:
            raise Untestable(str(error)) from error
