"""A training of GRPO or RLOO with a setting, held against the reference. Runs inside the ranks.

Imports the stack only inside functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import comparison, conventions, images
from pytest_trlcompat.conformance.grpo import configs, objects, quantities, recording, truth
from pytest_trlcompat.conformance.grpo.methods import GRPO, Method

from . import grpo, in_step, refusals
from .grpo_steps import of_all_ranks
from .models import bare_name, whole

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.conformance.grpo.records import Recording
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["gathering", "held", "reported", "trainer_class", "without_numbers"]


def held(
    subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int, partly: bool, method: Method = GRPO
) -> dict[str, Any]:
    """As :func:`suites.in_rank.conformance.hold` says of each setting."""
    import trl

    known = configs.known_part(trl, setting, method)
    unknown = sorted(set(setting) - set(known))
    found: dict[str, Any] = {"failure": None, "differences": [], "compared": 0, "unknown": unknown}
    if unknown and not partly:
        return found
    if lacking := configs.lacking(known):
        return {**found, "lacking": lacking}
    with in_step.training() as training:
        kind = trainer_class(subject, method.trainer_class)
        recorded = recording.record(kind, model, setting, seed, gathering(), method)
    if (ended := without_numbers(setting, training)) is not None:
        return {**found, **ended}
    recordings = of_all_ranks(recorded)
    if int(os.environ.get("RANK", "0")):
        return found
    return {**found, **_compared(recordings, model, known, method, seed)}


def without_numbers(setting: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is found of a training that ended in an error, or was to be refused; ``None``: there is one to compare.

    Args:
        training: of :func:`.in_step.training`.
    """
    said = training.get("text")
    if setting.get("refused") == "allowed":
        return {"refused_with": said} if said else None
    if setting.get("refused"):
        wrong = [each for each in _wrong_refusals(setting, training) if each["expected"] != each["found"]]
        return {"compared": 1, "differences": wrong[:1], "refused_with": said}
    return {"failure": said} if said else None


def _wrong_refusals(setting: Mapping[str, Any], training: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a refusal must be, and what there was instead: an error that names the argument, if its row says so, is
    raised on purpose, and comes before a training begins, unless only that shows what is wrong."""
    said, named = training.get("text"), str(setting.get("refused_naming") or "")
    latest = {"evaluation": refusals.EVALUATION, "training": refusals.TRAINING}
    in_time = latest.get(str(setting.get("refused_in")), refusals.BEFORE)
    when = str(training.get("phase"))
    found: tuple[tuple[str, str, bool], ...] = (
        ("", "an error", bool(said)),
        ("[text]", named, bool(said) and named in str(said)),
        ("[raised]", "an error that is raised on purpose", bool(training.get("meant"))),
        ("[when]", in_time, when in (refusals.BEFORE, in_time)),
    )
    for stage, wanted, is_right in found:
        seen = {"": "a training", "[when]": f"{when}: {said}"}.get(stage, said)
        yield {"stage": f"refusal{stage}", "where": "", "expected": [wanted], "found": [wanted if is_right else seen]}


def reported(held: comparison.Held) -> dict[str, Any]:
    """As :func:`suites.in_rank.conformance.hold` returns it."""
    differences = [vars(difference) for difference in held.differences]
    return {**held._asdict(), "differences": differences, "shortfall": held.shortfall()}


def trainer_class(subject: str, name: str) -> type:
    """TRL's trainer of that name, or the corrected one."""
    import trl

    from pytest_trlcompat import trainers

    if name == GRPO.trainer_class:
        return grpo.trainer_class(subject)
    chosen: type = getattr(trainers if subject == "corrected" else trl, name)
    return chosen


def gathering() -> Any:
    """How weights are gathered where the launch's strategy shards them, or keeps gradients to itself."""
    sharded = any(os.environ.get(name) == "true" for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"))
    return whole_weights if sharded else None


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Of the trained parameters, gathered, in float32."""
    trained = {bare_name(name) for name, each in trainer.model.named_parameters() if each.requires_grad}
    return {name: weight for name, weight in whole(trainer.model_wrapped).items() if name in trained}


def _compared(
    recordings: list[Recording], model: TinyModel, setting: Mapping[str, Any], method: Method, seed: int
) -> dict[str, Any]:
    import transformers

    known = conventions.of_installed(method.trainer)
    policy, reference_model = objects.untrained(model, setting)
    rewards = objects.rewards_of_reference(model, setting)
    data = objects.data_of(model, setting, seed, 1)
    words = objects.tokenizer(model, setting) if data.images is not None else model.tokenizer
    inputs: dict[tuple[int, ...], Mapping[str, torch.Tensor]] = {}
    for part in ("training", "evaluation"):
        inputs |= objects.inputs_asked(model, data, setting, part)
    never = (words.tokenizer.convert_tokens_to_ids(images.IMAGE_TOKEN),) if data.images is not None else ()

    def computed(policy: torch.nn.Module, reference_model: torch.nn.Module, padded: bool = False) -> truth.Truth:
        return truth.computed(
            *(recordings, policy, words, rewards, known, data.ends, reference_model, padded, method),
            *(inputs, never),
        )

    def neighbours() -> list[truth.Truth]:
        # Tokens with the same prefix have the same entropy, and which of them top_entropy_quantile takes, rounding
        # decides: changed weights leave them equal, another order of sums does not.
        beside = comparison.neighbours(policy, reference_model)
        return [computed(policy_beside, reference_beside, padded=True) for policy_beside, reference_beside in beside]

    try:
        expected = computed(policy, reference_model)
    except comparison.OutOfStep as error:
        return {"differences": [{"stage": "sampling", "where": "", "said": str(error)}]}
    major = int(transformers.__version__.partition(".")[0])
    unrecorded = known.unrecorded_with(recordings[0].arguments)
    return reported(quantities.differences(recordings, expected, neighbours, major, unrecorded))
