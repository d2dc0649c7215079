"""Whether a known issue bites a training, by the settings that show it.

An entry that says ``when`` is taken at its word. For what the conformance suites found, conditions follow from the rows
that show it with the stack in question, and from ``difference.setting``, without which it does not show. Of other
issues the variants that their suites measure say something, ``zero3-bf16_weights``. Where nothing does, it cannot be
told. Imports no package of the stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_trlcompat.catalog.issue import FINDINGS, KnownIssue, kind, measured_with
from pytest_trlcompat.conformance import rows
from pytest_trlcompat.conformance.row_conditions import INSTRUMENTS, conditions_of
from pytest_trlcompat.conformance.rows import Row
from pytest_trlcompat.strategies import NAMES as STRATEGIES
from pytest_trlcompat.strategies import parts_of
from pytest_trlcompat.training.answers import Answer, Bite, all_of, any_of
from pytest_trlcompat.training.axes import look_at
from pytest_trlcompat.training.conditions import Condition, Defaults, evaluate
from pytest_trlcompat.training.training import UNKNOWN, Training

__all__ = ["VARIANTS", "bites"]

_NEEDED: Mapping[str, Mapping[str, Any]] = {"peft": {"adapter.type": {"given": True}}, "vllm": {"use_vllm": True}}
"""What a training has that uses a package without which an issue cannot show."""
_LORA = {"adapter.type": {"given": True}}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": {"above": 1}},
    "bf16": {"bf16": True},
    "bf16_loss": {"bf16": True},
    "bf16_weights": {"model.dtype": "bfloat16"},
    "checkpointing": {"gradient_checkpointing": True},
    "compiled": {"torch_compile": True},
    "direct": {"life.kind": "unwrap_model_for_generation is called with trainer.model"},
    "dora": {"adapter.dora": True},
    "lora": _LORA,
    "lora_bf16": {**_LORA, "model.dtype": "bfloat16"},
    "moe": {"model.experts": True},
    "no_gather": {"ds3_gather_for_generation": False},
    "no_shard": {"engine.fsdp_sharding": "no_shard"},
    "not_reentrant": {"gradient_checkpointing_kwargs": [{"use_reentrant": False}]},
    "offload_parameters": {"engine.offload_parameters": True},
    "optimizer": {"optimizer.deepspeed": {"given": True}},
    "peft_config": {**_LORA, "adapter.made_by": "trainer"},
    "peft_model": {**_LORA, "adapter.made_by": "user"},
    "resume": {"life.resumed": True},
    "resumed": {"life.resumed": True},
    "scheduler": {"optimizer.deepspeed_scheduler": {"given": True}},
    "server": {"vllm_mode": "server"},
    "server_lora": {"vllm_mode": "server", **_LORA},
    "tied": {"model.tied": True},
    "tokens": {"adapter.trains_tokens": True},
    "vision": {"model.vision": True},
    "wrapper_checkpointing": {"engine.wrapper_checkpointing": True},
}
"""Words of labels, behind the strategy, to what they are in a training."""


def bites(issue: KnownIssue, labels: Sequence[str], training: Training, defaults: Defaults, unless: str = "") -> Answer:
    """Whether an issue bites a training.

    Args:
        labels: of the settings and strategies that show it with the stack in question, as its suite names them.
        unless: why it is not certain that these show it; empty where it is.
    """
    needed = [evaluate(_NEEDED[package], training, defaults) for package in issue.needs if package in _NEEDED]
    shown = any_of(_showing(issue, labels, training, defaults))
    if shown.bites and unless:
        shown = Answer(Bite.CANNOT_TELL, look=(unless,))
    return all_of([*needed, shown])


def _showing(issue: KnownIssue, labels: Sequence[str], training: Training, defaults: Defaults) -> Iterator[Answer]:
    """The answer for every label."""
    is_finding = issue.suite == FINDINGS and issue.when is None
    measured = measured_with(issue.id)
    # Under whatever strategy, so that it need not be known.
    anywhere = Answer(Bite.BITES) if not issue.strategies and set(STRATEGIES) <= set(labels) else None
    in_general = None if issue.when is None else evaluate(issue.when, training, defaults)
    for label in labels:
        under = anywhere or _under(label, training, lightly=issue.suite == FINDINGS)
        if issue.when is not None and in_general is not None:
            condition = _beside(issue.when, label)
            stated = in_general if condition is issue.when else evaluate(condition, training, defaults)
            variant = [_of_variant(issue, label, training, defaults)] if parts_of(label)[2] else []
            of_row = label in rows.labels(measured) if issue.suite == FINDINGS else False
            yield all_of([under, stated, *([] if of_row else variant)])
        elif is_finding and (row := rows.row_named(measured, label)) is not None:
            # What another strategy shows is settled before the row is read.
            yield under if under.bite is Bite.DOES_NOT else all_of([under, _of_row(row, issue, training, defaults)])
        else:
            yield all_of([under, _of_variant(issue, label, training, defaults)])


def _beside(condition: Condition, label: str) -> Condition:
    """What an entry states, without the axes of which the variant of a label says what they were."""
    words = (word for word in parts_of(label)[2].split("-") if word in VARIANTS)
    varied = {axis for word in words for axis in VARIANTS[word]}
    if not varied:
        return condition
    tables = [condition] if isinstance(condition, Mapping) else condition
    return [{axis: value for axis, value in table.items() if axis not in varied} for table in tables]


def _under(label: str, training: Training, lightly: bool) -> Answer:
    """Whether ranks share the work as a label says.

    Args:
        lightly: whether what one process shows, several do as well: of a loss that is computed wrongly.
    """
    strategy, mine = kind(label), training.value("parallel.strategy")
    if strategy == "single" and lightly:
        return Answer(Bite.BITES)
    if mine is UNKNOWN:
        return Answer(Bite.CANNOT_TELL, look=(look_at("parallel.strategy", strategy),))
    if mine == strategy:
        return Answer(Bite.BITES, (f"parallel.strategy={mine!r}",))
    if lightly and mine != "single":
        return Answer(Bite.CANNOT_TELL, look=(f"measured under {strategy}, not under {mine}",))
    return Answer(Bite.DOES_NOT, (f"parallel.strategy={mine!r}",))


def _of_variant(issue: KnownIssue, label: str, training: Training, defaults: Defaults) -> Answer:
    _, _, variant = parts_of(label)
    words = variant.split("-") if variant else []
    unknown = [word for word in words if word not in VARIANTS]
    answers = [evaluate(VARIANTS[word], training, defaults) for word in words if word in VARIANTS]
    if not words or unknown:
        answers.append(Answer(Bite.CANNOT_TELL, look=(f"whether you see this: {issue.wrong}",)))
    return all_of(answers)


def _of_row(row: Row, issue: KnownIssue, training: Training, defaults: Defaults) -> Answer:
    """Whether a training agrees with a row in what the row is about.

    What the entry states must agree. Of a row of one thing, that must; of several it is not known which of them matter,
    so that a training that has some of them cannot be told from here.
    """
    stated = _stated(issue, row.setting)
    about = {axis: value for axis, value in row.setting.items() if axis not in INSTRUMENTS or axis in stated}
    about = about or dict(row.setting)
    answers = {axis: evaluate(conditions_of(axis, value), training, defaults) for axis, value in about.items()}
    must = [answers[axis] for axis in stated] if stated else list(answers.values())
    if stated:
        required = all_of(must)
        if required.bite is not Bite.BITES:
            return required
    elif len(must) > 1 and not row.is_of_array and all(answer.bite is Bite.DOES_NOT for answer in must):
        return all_of(must)
    elif len(must) == 1 and not row.is_of_array:
        return must[0]
    together = all_of(answers.values())
    if together.bite is not Bite.DOES_NOT:
        return together
    text = ", ".join(f"{axis}={value!r}" for axis, value in about.items())
    return Answer(Bite.CANNOT_TELL, look=(f"it was measured with {text} together, of which you have a part",))


def _stated(issue: KnownIssue, setting: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes of a row without whose values the entry says that the issue does not show."""
    if issue.symptoms:
        return ()
    fitting = [difference.setting for difference in issue.differences if _fits(difference.setting, setting)]
    if not fitting or not all(fitting):
        return ()
    return tuple(dict.fromkeys(axis for required in fitting for axis in required))


def _fits(required: Mapping[str, Any], setting: Mapping[str, Any]) -> bool:
    return all(
        axis in setting and setting[axis] in (value if isinstance(value, list) else [value])
        for axis, value in required.items()
    )
