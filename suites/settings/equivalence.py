"""Whether a training with a setting is that of one process: losses, logs and how far each weight moved.

Runs in the test process.

In float32, what is left is the order of sums: of a tensor's movement 2e-5 of it were seen at most, of losses and logs
3e-8 and 7e-7. In bfloat16 the rounding of each operator is larger than some bugs, so that the tolerance is measured
with the same training: the weights are changed by at most one unit in the last place, three times, and the result may
differ from what is expected :data:`FACTOR` times as far as these do. An error of a few percent of a gradient's scale
stays unseen, an error of half of it does not.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.launch.result import is_of_ended_peer
from pytest_trlcompat.plugin.judging import Absent, Finding

from ..in_rank.settings import BF16_ULP, LOGGED, STEPS
from ..measured import largest
from ..verdicts import failure_of

__all__ = ["FACTOR", "judge_setting"]

FACTOR = 5.0
NUMBER_TOLERANCE = 2e-6
"""Absolute of numbers below 1, relative of larger ones."""
LOSS_ROUNDING = 1e-4
"""Transformers 4 rounds the losses that it logs to four digits; ``losses`` are the trainer's own, and compared too."""
MOVEMENT_TOLERANCE = 2e-4
"""Relative to the Euclidean norm of a tensor's movement."""
SIGNIFICANT_MOVEMENT, SIGNIFICANT_LOSS = 1e-2, 1e-4
"""How far the most moved tensor must move, and what some loss must be, so that equality says something."""

_NO_VISION = (
    "Qwen2VLForConditionalGeneration.forward() got an unexpected keyword argument",
    "Unrecognized configuration class <class 'transformers.models.qwen2_vl.",
)
"""What TRL's GRPO says of a vision model before it knows such."""


def judge_setting(
    issue: str, ranks: Sequence[Mapping[str, Any]], in_one_process: Sequence[Mapping[str, Any]]
) -> Finding:
    """
    Args:
        issue: whose symptoms make a failure ``broken``.
        ranks: what :func:`suites.in_rank.settings.train` returned on each.
        in_one_process: the same of one process, first as it is, then with weights changed by a unit in the last place.

    Raises:
        Absent: this release of TRL calls the model as a vision model cannot be called.
    """
    for trainings in (in_one_process, ranks):
        failures = dict.fromkeys(training["failure"] or training["gathering"] for training in trainings)
        failures.pop(None, None)
        if failures:
            root = [text for text in failures if not is_of_ended_peer(text)] or list(failures)
            where = "single" if trainings is in_one_process else "ranks"
            if any(words in root[0] for words in _NO_VISION):
                raise Absent(f"GRPO of this release of TRL trains no Qwen2-VL: {root[0]}")
            verdict = failure_of(issue, {where: root[0]}) or Verdict.ERROR
            return Finding(
                verdict,
                {"failure": root[0], "failed_in": where, "losses": [training["losses"] for training in trainings]},
            )
    expected, *neighbours = in_one_process
    assert len(expected["logs"]["grad_norm"]) == STEPS
    numbers, expected_numbers, near = (
        _numbers(ranks),
        _numbers([expected]),
        [_numbers([neighbour]) for neighbour in neighbours],
    )
    wrong = {}
    evidence: dict[str, Any] = {"dtypes": list(ranks[0]["dtypes"]), "checkpointing": list(ranks[0]["checkpointing"])}
    for key, values in expected_numbers.items():
        # Rounded losses would hide how far apart neighbours are.
        unrounded = "losses" if key == "loss" else key
        spread = largest([0.0, *(_apart(neighbour[unrounded], expected_numbers[unrounded]) for neighbour in near)])
        assert math.isfinite(spread), f"{key} of a neighbour is not finite, so that no tolerance follows: {near}"
        off = _apart(numbers.get(key, []), values)  # none of what a training does not log
        allowed = NUMBER_TOLERANCE * max(1.0, *map(abs, values)) + FACTOR * spread
        allowed += LOSS_ROUNDING if key == "loss" else 0.0
        evidence[key], evidence[f"{key}_single"] = numbers.get(key, []), values
        if not off <= allowed:
            wrong[key] = {"off": off, "allowed": allowed}
    moved, true_moves = _movements(ranks[0]), _movements(expected)
    assert max(math.hypot(*moves) for moves in true_moves.values()) > SIGNIFICANT_MOVEMENT
    assert max(expected_numbers["losses"]) > SIGNIFICANT_LOSS
    if {name: len(moves) for name, moves in moved.items()} != {name: len(moves) for name, moves in true_moves.items()}:
        return Finding(Verdict.SILENT, {**evidence, "other_weights": sorted(set(moved) ^ set(true_moves))})
    movements = [_movements(neighbour) for neighbour in neighbours]
    off_by = {name: _distance([name], moved, true_moves) for name in moved}
    for name, off in {**off_by, "all weights": _distance(list(moved), moved, true_moves)}.items():
        names = list(moved) if name == "all weights" else [name]
        spread = largest([0.0, *(_distance(names, movement, true_moves) for movement in movements)])
        assert math.isfinite(spread), f"{name} of a neighbour are not finite, so that no tolerance follows"
        allowed = MOVEMENT_TOLERANCE * _size(names, true_moves) + 1e-7 + FACTOR * spread
        # A weight that stays in one process may step to the next number here.
        if expected["dtypes"] == ["torch.bfloat16"]:
            allowed += 2 * BF16_ULP * max(_greatest(expected["initial"][weight]) for weight in names)
        if not off <= allowed:
            wrong[name] = {"off": off, "allowed": allowed, "moved": _size(names, true_moves)}
    evidence["weights_off_by"] = _distance(list(moved), moved, true_moves) / _size(list(moved), true_moves)
    evidence["weights_may_be_off_by"] = max(
        (_distance(list(moved), movement, true_moves) / _size(list(moved), true_moves) for movement in movements),
        default=0.0,
    )
    if wrong:
        evidence["wrong"] = dict(sorted(wrong.items(), key=lambda item: -item[1]["off"] / item[1]["allowed"])[:5])
    return Finding(Verdict.SILENT if wrong else Verdict.OK, evidence)


def _numbers(ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    losses = [sum(step) / len(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return {"losses": losses, **{key: list(ranks[0]["logs"][key]) for key in LOGGED if ranks[0]["logs"][key]}}


def _apart(numbers: Sequence[float], expected: Sequence[float]) -> float:
    if len(numbers) != len(expected):
        return math.inf
    return largest(abs(left - right) for left, right in zip(numbers, expected, strict=True))


def _movements(training: Mapping[str, Any]) -> dict[str, list[float]]:
    before = training["initial"]
    return {
        name: [new - old for new, old in zip(array("f", data), array("f", before[name]), strict=True)]
        for name, data in training["trained"].items()
    }


def _distance(names: Sequence[str], movements: Mapping[str, list[float]], expected: Mapping[str, list[float]]) -> float:
    return math.hypot(*(math.dist(movements[name], expected[name]) for name in names))


def _greatest(data: bytes) -> float:
    return max(map(abs, array("f", data)), default=0.0)


def _size(names: Sequence[str], movements: Mapping[str, list[float]]) -> float:
    return math.hypot(*(math.hypot(*movements[name]) for name in names))
