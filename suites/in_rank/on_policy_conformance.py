"""A training of PPO, or of the first RLOO, with a setting, held against the reference. Runs inside the ranks.

Imports the stack only inside functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from pytest_trlcompat.conformance import comparison, conventions
from pytest_trlcompat.conformance.first_rloo import quantities as first_rloo_quantities
from pytest_trlcompat.conformance.first_rloo import truth as first_rloo_truth
from pytest_trlcompat.conformance.on_policy.quantities import before_steps
from pytest_trlcompat.conformance.ppo import quantities as ppo_quantities
from pytest_trlcompat.conformance.ppo import truth as ppo_truth

from . import first_rloo, first_rloo_recording, in_step, ppo_recording
from .grpo_conformance import reported, without_numbers
from .grpo_steps import of_all_ranks

if TYPE_CHECKING:
    from pytest_trlcompat.conformance.comparison import Quantity
    from pytest_trlcompat.conformance.conventions import Conventions
    from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["FIRST_RLOO", "PPO", "Method", "held"]


@dataclass(frozen=True)
class Method:
    """
    Attributes:
        trainer: one of :data:`pytest_trlcompat.conformance.rows.TRAINERS`.
        trained: attributes of what there was before a training: the models that are trained.
        unknown: what of a setting this release does not know.
        record: trains, and returns what was recorded and what there was before.
        expected: the reference's quantities of what was recorded.
        recorded: those that were recorded.
    """

    trainer: str
    trained: tuple[str, ...]
    unknown: Callable[[Mapping[str, Any]], list[str]]
    record: Callable[[str, TinyModel, Mapping[str, Any], int], tuple[OnPolicyRecording, Any]]
    expected: Callable[[Sequence[OnPolicyRecording], Any, Conventions], list[Quantity]]
    recorded: Callable[[Sequence[OnPolicyRecording]], Mapping[tuple[str, str], Any]]


def held(
    method: Method, subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int, partly: bool
) -> dict[str, Any]:
    """As :func:`suites.in_rank.conformance.hold` says of each setting. The first rank alone compares, for all ranks."""
    unknown = method.unknown(setting)
    found: dict[str, Any] = {"failure": None, "differences": [], "compared": 0, "unknown": unknown}
    if unknown and not partly:
        return found
    with in_step.training() as training:
        recorded, before = method.record(subject, model, setting, seed)
    if (ended := without_numbers(setting, training)) is not None:
        return {**found, **ended}
    every = of_all_ranks(recorded)
    return {**found, **_compared(method, every, before)} if recorded.rank == 0 else found


def _compared(method: Method, recordings: list[OnPolicyRecording], untrained: Any) -> dict[str, Any]:
    known = conventions.of_installed(method.trainer)
    unrecorded = known.unrecorded_with(recordings[0].arguments)

    def expected(untrained: Any) -> list[Quantity]:
        return comparison.stated(method.expected(recordings, untrained, known), unrecorded)

    def neighbours() -> list[list[Quantity]]:
        models = [getattr(untrained, name) for name in method.trained]
        return [
            expected(dataclasses.replace(untrained, **dict(zip(method.trained, changed, strict=True))))
            for changed in comparison.neighbours(*models)
        ]

    try:
        wanted = expected(untrained)
    except comparison.OutOfStep as error:
        return {"differences": [{"stage": "updates", "where": "", "said": str(error)}]}
    found = method.recorded(recordings)
    return reported(comparison.held(wanted, found, neighbours, before_steps(recordings[0]) if _is_measured() else ()))


def _is_measured() -> bool:
    """Whether what precedes the steps is compared: it was measured from 0.12 on."""
    return Version(metadata.version("trl")) >= Version("0.12")


def _not_fields(setting: Mapping[str, Any], config: type) -> list[str]:
    return sorted(set(setting) - {each.name for each in dataclasses.fields(config)})


def _logging_steps(recordings: Sequence[OnPolicyRecording]) -> int:
    return int(recordings[0].arguments["logging_steps"])


def _rows(recordings: Sequence[OnPolicyRecording]) -> int:
    """Of a batch on one rank, as documented."""
    arguments = recordings[0].arguments
    return int(arguments["per_device_train_batch_size"]) * int(arguments["gradient_accumulation_steps"])


def _unknown_of_ppo(setting: Mapping[str, Any]) -> list[str]:
    from pytest_trlcompat.trainers import PPOConfig

    of_config = {name: value for name, value in setting.items() if name not in ppo_recording.AXES}
    return [*_not_fields(of_config, PPOConfig), *ppo_recording.unknown(setting)]


def _unknown_of_first_rloo(setting: Mapping[str, Any]) -> list[str]:
    of_config = {name: value for name, value in setting.items() if name not in first_rloo_recording.AXES}
    return [*_not_fields(of_config, first_rloo.config_class()), *first_rloo_recording.unknown(setting)]


def _expected_of_ppo(
    recordings: Sequence[OnPolicyRecording], before: ppo_truth.Untrained, known: Conventions
) -> list[Quantity]:
    steps = ppo_truth.computed(recordings, before, known)
    rows = _rows(recordings) if _is_measured() else None
    return list(ppo_quantities.expected_quantities(steps, _logging_steps(recordings), rows))


def _expected_of_first_rloo(
    recordings: Sequence[OnPolicyRecording], before: first_rloo_truth.Untrained, known: Conventions
) -> list[Quantity]:
    arguments = recordings[0].arguments
    rows = _rows(recordings)
    updates = int(arguments["num_ppo_epochs"]) * int(arguments["num_mini_batches"])
    saves = str(getattr(arguments["save_strategy"], "value", arguments["save_strategy"])) == "steps" and updates == 1
    steps = first_rloo_truth.computed(recordings, before, known)
    prompts = int(arguments["local_batch_size"]) * len(recordings) / int(arguments["rloo_k"])
    return list(
        first_rloo_quantities.expected_quantities(
            steps,
            _logging_steps(recordings),
            rows,
            prompts / recordings[0].prompts if _is_measured() else None,
            int(arguments["save_steps"]) if saves else 0,
        )
    )


PPO = Method(
    trainer="ppo",
    trained=("policy", "value_model"),
    unknown=_unknown_of_ppo,
    record=ppo_recording.record,
    expected=_expected_of_ppo,
    recorded=ppo_quantities.recorded_quantities,
)
FIRST_RLOO = Method(
    trainer="first_rloo",
    trained=("policy",),
    unknown=_unknown_of_first_rloo,
    record=first_rloo_recording.record,
    expected=_expected_of_first_rloo,
    recorded=first_rloo_quantities.recorded_quantities,
)
