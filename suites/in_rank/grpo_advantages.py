"""The advantages that GRPO trains on, for known rewards and each way of scaling them: runs inside a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.accelerator import artefacts

from . import grpo

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["SCALES", "advantages"]

SCALES = ("group", "batch", "none")
# The deviations of the two groups and of the batch all differ, so that it shows where they are mixed up.
REWARDS = (1.0, 3.0, 10.0, 20.0)
"""Of two groups of two."""
_ADDED = 1e-4
"""To the deviation, as documented, so that equal rewards divide by something."""


def advantages(subject: str, model: TinyModel) -> dict[str, dict[str, Any]]:
    """Train a step with each way of scaling.

    Returns:
        For each of :data:`SCALES` the advantages that were ``found`` and those ``expected``, both sorted; or the
        ``failure`` of the training; or ``absent``, with what this release does not know.
    """
    return {scale: _measure(subject, model, scale) for scale in SCALES}


def _measure(subject: str, model: TinyModel, scale: str) -> dict[str, Any]:
    from pytest_trlcompat.trainers import CureError

    settings = _settings(scale)
    if settings is None:
        return {"absent": f"GRPOConfig of this release does not scale by {scale}"}
    seen: list[Mapping[str, Any]] = []

    class Recording(grpo.trainer_class(subject)):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)

    arguments = {"reward_funcs": lambda completions, **_: list(REWARDS[: len(completions)])}
    try:
        trainer = grpo.build_trainer(subject, model, Recording, arguments, max_steps=1, **settings)
        trainer.train()
    except CureError as error:
        return {"absent": str(error)} if scale == "batch" else {"failure": artefacts.error_text(error)}
    except Exception as error:
        # What fails later, in the loss, is not what is judged here.
        if not seen:
            return {"failure": artefacts.error_text(error)}
    if "advantages" not in seen[0]:
        return {"absent": "this release computes advantages within its loss"}
    return {"found": sorted(seen[0]["advantages"].tolist()), "expected": sorted(_expected(scale))}


def _settings(scale: str) -> dict[str, Any] | None:
    """Of ``GRPOConfig``: by group is the default, and there was no other one at first, then a switch, then three."""
    import trl

    field = trl.GRPOConfig.__dataclass_fields__.get("scale_rewards")
    if scale == "group":
        return {}
    if field is None or (scale == "batch" and isinstance(field.default, bool)):
        return None
    return {"scale_rewards": False if isinstance(field.default, bool) else scale}


def _expected(scale: str) -> list[float]:
    groups: Sequence[Sequence[float]] = [REWARDS[:2], REWARDS[2:]]
    if scale == "none":
        return [reward - mean(group) for group in groups for reward in group]
    return [
        (reward - mean(group)) / (stdev(group if scale == "group" else REWARDS) + _ADDED)
        for group in groups
        for reward in group
    ]
