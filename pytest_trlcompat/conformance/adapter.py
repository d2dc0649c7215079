"""What the driver asks of a trainer; each trainer's folder has one instance, ``ADAPTER`` in its ``adapter.py``.

Runs inside a rank.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_trlcompat.conformance.comparison import Comparison

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["TrainerAdapter", "exported", "trainer_class"]


class TrainerAdapter(abc.ABC):
    """How one trainer is trained with a setting, and what of the training the reference computes too.

    Attributes:
        trainer: one of :data:`~pytest_trlcompat.conformance.rows.TRAINERS`, the name of its folder.
        mismatch_stage: stage of the difference that is reported where the number of samples or steps is not the one
            that the arguments ask for.
    """

    trainer: ClassVar[str]
    mismatch_stage: ClassVar[str] = "updates"

    def absence(self) -> str:
        """Why the installed release of TRL has no such trainer, as a sentence; empty where it has."""
        return ""

    @abc.abstractmethod
    def unknown(self, setting: Mapping[str, Any]) -> list[str]:
        """Names in the setting that this release does not know."""

    def lacking(self, setting: Mapping[str, Any]) -> str:
        """Which package the setting needs and this environment lacks, as a sentence; empty where nothing is lacking."""
        return ""

    @abc.abstractmethod
    def record(self, subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int) -> tuple[Any, Any]:
        """Train.

        Args:
            subject: ``upstream`` or ``corrected``.
            seed: of the data.

        Returns:
            The recording of this rank; and the models as they were before training, where :meth:`compare` cannot build
            them again, else ``None``.
        """

    @abc.abstractmethod
    def compare(
        self, recordings: Sequence[Any], untrained: Any, model: TinyModel, setting: Mapping[str, Any], seed: int
    ) -> Comparison:
        """Compare a training with what the reference gives; on the first rank alone.

        Args:
            recordings: of all ranks.
            untrained: the second part of what :meth:`record` returned.
            setting: the part of it that this release knows.

        Raises:
            StepCountMismatch: the number of samples or steps is not the one that the arguments ask for.
            ToleranceUnknown: rounding changes the first step so much that no difference could be told from it.
        """


def exported(trl: Any, name: str) -> Any:
    """What TRL exports by that name, ``ORPOTrainer`` or ``ORPOConfig``: itself, or its experimental package, ``orpo``.

    Raises:
        ImportError: this release has neither.
    """
    if hasattr(trl, name):
        return getattr(trl, name)
    package = name.removesuffix("Trainer").removesuffix("Config").lower()
    return getattr(import_module(f"trl.experimental.{package}"), name)


def trainer_class(subject: str, name: str) -> type:
    """TRL's trainer of that name, or the corrected one: by its own name, or by ``cured()`` where it has none."""
    import trl

    from pytest_trlcompat import trainers

    if subject != "corrected":
        chosen: type = exported(trl, name)
        return chosen
    corrected: type = getattr(trainers, name) if name in trainers.__all__ else trainers.cured(exported(trl, name))
    return corrected
