"""Cure of ``ppo-objective-entropy``: PPO logs the entropy of responses without their padding.

TRL's PPO trainer adds up the negative log-probabilities of a response, and has set that of each token of padding to -1
before. The cure adds to ``objective/entropy`` the mean number of tokens of padding, by the mask with which upstream
whitens the advantages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from packaging.version import Version

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError, installed_version
from pytest_trlcompat.trainers.curing.patching import replaced
from pytest_trlcompat.trainers.curing.trl_ppo import ppo_module

__all__ = ["PPOObjectiveEntropyMixin"]

_ENTROPY = "objective/entropy"
_RIGHT_FROM = Version("1.10")
"""The first release of TRL that leaves padding out."""


class PPOObjectiveEntropyMixin(Cure):
    """Lets a subclass of TRL's PPO trainer log an ``objective/entropy`` in which padding does not count.

    Does nothing with releases that leave it out themselves, known by their version.

    Raises:
        CureError: when an entropy is logged and no advantages were whitened before.
    """

    _kinds: ClassVar = {
        "ppo": ("PPOEosCountMixin", "its log calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (
        *patch_points.in_ppo("masked_whiten"),
        *patch_points.ppo_methods("train"),
        patch_points.trainer_method("log"),
    )
    accelerator: Any
    _padding: torch.Tensor | None = None
    """Mean number of tokens of padding in a response of this rank's batch."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        if not _counts_padding():
            return upstream.train(*args, **kwargs)
        point = patch_points.ppo("masked_whiten", ppo_module().__name__)
        with replaced(point, self._seeing_padding, PPOObjectiveEntropyMixin.__name__):
            return upstream.train(*args, **kwargs)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As ``Trainer.log``; collective where ``logs`` has the entropy, as upstream's gathering before it is."""
        upstream: Any = super()
        if _ENTROPY in logs and _counts_padding():
            logs = {**logs, _ENTROPY: logs[_ENTROPY] + self._mean_padding()}
        upstream.log(logs, *args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if _counts_padding():
            return Activity(True, "TRL adds up the log-probabilities of padding")
        return Activity(False, "TRL leaves padding out")

    def _seeing_padding(self, upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def masked_whiten(values: torch.Tensor, mask: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # The last call of a batch is for advantages, which only tokens have; one before it may be for rewards.
            self._padding = (~mask).sum(1).double().mean()
            return upstream(values, mask, *args, **kwargs)

        return masked_whiten

    def _mean_padding(self) -> float:
        if self._padding is None:
            raise CureError(
                PPOObjectiveEntropyMixin.__name__,
                expected="a call of masked_whiten before each log",
                seen="there was none",
                packages=("trl",),
            )
        padding, self._padding = self._padding, None
        return float(self.accelerator.reduce(padding, "mean"))


def _counts_padding() -> bool:
    return Version(installed_version("trl") or "0") < _RIGHT_FROM
