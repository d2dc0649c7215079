"""The trainers that train on sampled completions, and the names that TRL and the reference have for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["GRPO", "METHODS", "RLOO", "Method"]


@dataclass(frozen=True)
class Method:
    """
    Attributes:
        trainer: one of :data:`~pytest_trlcompat.conformance.rows.TRAINERS`.
        since: the first release of TRL whose trainer samples and trains in this way.
    """

    trainer: str
    since: str

    @property
    def trainer_class(self) -> str:
        return f"{self.trainer.upper()}Trainer"

    @property
    def config_class(self) -> str:
        return f"{self.trainer.upper()}Config"

    @property
    def module(self) -> str:
        """The module of TRL that defines the trainer."""
        return f"trl.trainer.{self.trainer}_trainer"

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The reference's training."""
        return getattr(_reference(), f"{self.trainer}_train")(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The reference's evaluation."""
        return getattr(_reference(), f"{self.trainer}_evaluate")(*args, **kwargs)

    @property
    def settings(self) -> Any:
        """The reference's class of settings."""
        return getattr(_reference(), f"{self.trainer.upper()}Settings")

    @property
    def undecided(self) -> Any:
        """The reference's class of what documentation leaves open."""
        return _reference().Undecided if self is GRPO else _reference().RLOOUndecided

    def training_metrics(self, *args: Any) -> dict[str, float]:
        """The reference's metrics of tokens that are trained on."""
        name = "training_metrics" if self is GRPO else "rloo_training_metrics"
        metrics: dict[str, float] = getattr(_reference(), name)(*args)
        return metrics


def _reference() -> Any:
    from pytest_trlcompat import reference

    return reference


GRPO = Method("grpo", "0.14")
RLOO = Method("rloo", "0.22")
METHODS = {method.trainer: method for method in (GRPO, RLOO)}
