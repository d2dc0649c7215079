"""GRPO trainings with settings, each held against the reference. Runs inside the ranks.

Imports the stack only inside functions.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import comparison, configs, conventions, objects, recording, truth

from . import grpo
from .grpo_steps import of_all_ranks
from .models import bare_name, whole
from .settings import BF16_ULP
from .sharding import failure

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.conformance.records import Recording
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["hold"]

_SHOWN = 40
"""Differences that are returned: those of the first step say enough."""
_ULP = 2.0**-23
_NEIGHBOURS = (1, 2, 3)
"""Seeds of changes by rounding: where a training is about to diverge, a single one may by chance change little."""


def hold(
    subject: str,
    model: TinyModel,
    settings: Mapping[str, Mapping[str, Any]],
    seed: int = 0,
    partly: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Train with each setting, and compare.

    Args:
        partly: settings that are tried without what this release does not know; any other one then is not.

    Returns:
        By setting: ``failure``, what the training ended in; ``differences``, each with ``stage``, ``where``,
        ``expected``, ``found``, ``off`` and ``allowed``, the first one first; ``compared``, how many quantities; and
        ``unknown``, what of the setting this release does not know.
    """
    return {name: _held(subject, model, setting, seed, name in partly) for name, setting in settings.items()}


def _held(subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int, partly: bool) -> dict[str, Any]:
    import trl

    known = configs.known_part(trl, setting)
    unknown = sorted(set(setting) - set(known))
    found: dict[str, Any] = {"failure": None, "differences": [], "compared": 0, "unknown": unknown}
    if unknown and not partly:
        return found
    with failure() as training:
        recorded = recording.record(grpo.trainer_class(subject), model, setting, seed, whole=_gathering())
    if setting.get("refused") == "allowed":
        if training:
            return {**found, "refused_with": training["text"]}
    elif setting.get("refused"):
        accepted = {"stage": "refusal", "where": "", "expected": ["an error"], "found": ["a training"]}
        said = training.get("text")
        return {**found, "compared": 1, "differences": [] if said else [accepted], "refused_with": said}
    if training:
        return {**found, "failure": training["text"]}
    recordings = of_all_ranks(recorded)
    if int(os.environ.get("RANK", "0")):
        return found
    return {**found, **_compared(recordings, model, known)}


def _gathering() -> Any:
    """How weights are gathered where the launch's strategy shards them, or keeps gradients to itself."""
    sharded = any(os.environ.get(name) == "true" for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"))
    return whole_weights if sharded else None


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Of the trained parameters, gathered, in float32."""
    trained = {bare_name(name) for name, each in trainer.model.named_parameters() if each.requires_grad}
    return {name: weight for name, weight in whole(trainer.model_wrapped).items() if name in trained}


def _compared(recordings: list[Recording], model: TinyModel, setting: Mapping[str, Any]) -> dict[str, Any]:
    from importlib import metadata

    import transformers

    known = conventions.of_release("grpo", metadata.version("trl"), transformers.__version__)
    policy, reference_model = objects.untrained(model, setting)
    rewards = setting.get("rewards", "letters")
    ends = objects.data_of(model, setting, 0, 1).ends

    def computed(policy: torch.nn.Module, reference_model: torch.nn.Module, padded: bool = False) -> truth.Truth:
        return truth.computed(recordings, policy, model.tokenizer, rewards, known, ends, reference_model, padded)

    def neighbours() -> list[truth.Truth]:
        # Tokens with the same prefix have the same entropy, and which of them top_entropy_quantile takes, rounding
        # decides: changed weights leave them equal, another order of sums does not.
        return [
            computed(_neighbour(policy, seed), _neighbour(reference_model, seed), padded=True) for seed in _NEIGHBOURS
        ]

    try:
        expected = computed(policy, reference_model)
    except truth.OutOfStep as error:
        return {"differences": [{"stage": "sampling", "where": "", "said": str(error)}]}
    major = int(transformers.__version__.partition(".")[0])
    differences = comparison.differences(recordings, expected, neighbours, major)
    return {
        "differences": [vars(each) for each in differences[:_SHOWN]],
        "compared": len(comparison.recorded_quantities(recordings, expected)),
    }


def _neighbour(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The model with each weight changed by -1, 0 or 1 unit in its last place."""
    import torch

    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            units = torch.randint(-1, 2, parameter.shape, generator=generator)
            size = _ULP if parameter.dtype is torch.float32 else BF16_ULP
            parameter.mul_((1 + units * size).to(parameter))
    return changed
