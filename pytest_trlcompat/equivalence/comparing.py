"""Compare recorded trainings with those in one process, in the order in which a step computes what is compared.

Runs in a rank, since it needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_trlcompat._due import Account
from pytest_trlcompat.conformance.comparison import FLOOR, Difference, NotFinite, Quantity, ToleranceUnknown, differing
from pytest_trlcompat.equivalence.recording import Training, load, place_of

__all__ = ["Divergence", "compare"]

_LOGGED = 1e-4
"""The precision to which Transformers rounds a loss in its log, up to release 4."""


@dataclass(frozen=True)
class Divergence:
    """How a training differs from the one in a single process.

    Attributes:
        differences: the first one first.
        reason: what explains it, where something does.
    """

    differences: tuple[Difference, ...]
    reason: str = ""


def compare(path: str, under: str, changed: Sequence[str], tolerance: float | None) -> Divergence:
    """Compare what two runs of :func:`~pytest_trlcompat.equivalence.recording.record` have saved.

    Args:
        path: of the run in one process; ``under``: of the run under a strategy.
        changed: of runs in one process whose weights were changed in their last place.
        tolerance: relative to the largest number of each quantity; ``None``: measured by those runs.
    """
    alone, under_strategy = load(path), load(under)
    if len(alone) != len(under_strategy):
        return _counted("trainings", "", len(alone), len(under_strategy))
    if not alone:
        return _short("", "nothing was trained")
    near = [load(run) for run in changed]
    for number, (single, parallel) in enumerate(zip(alone, under_strategy, strict=True)):
        place = place_of(number, len(alone))
        for noun, single_entries, parallel_entries in (
            ("steps", single.inputs, parallel.inputs),
            ("logged losses", single.logs, parallel.logs),
            ("trained weights", single.weights, parallel.weights),
        ):
            if len(single_entries) != len(parallel_entries):
                return _counted(noun, place, len(single_entries), len(parallel_entries))
        if (names := _of_names(single, parallel, place)) is not None:
            return names
        inputs = _of_inputs(single, parallel, place)
        if inputs is not None:
            return inputs
        differences = _of_numbers(single, parallel, [neighbour[number] for neighbour in near], place, tolerance)
        if differences:
            return Divergence(tuple(differences), _DROPOUT if single.dropout else "")
        for training, side in ((single, "in one process"), (parallel, "under the strategy")):
            if text := training.shortfall():
                return _short(place, f"{side} {text}")
    return Divergence(())


_DROPOUT = (
    "the model has dropout, and every rank draws what to drop with a random state of its own: set it to 0 to compare "
    "strategies"
)
_SAMPLED = (
    "each rank samples completions with a random state of its own (TRL seeds it by the rank's number), so that two "
    "ranks train on other completions than one process, which is meant. Compare with world_size=1, or have the "
    "function replay given completions"
)
_BATCHES = (
    "ranks were given other rows than one process is given that accumulates over as many batches: look at the sampler, "
    "at what drops or repeats rows at the end of the data, and at what shuffles them"
)


def _of_names(single: Training, parallel: Training, place: str) -> Divergence | None:
    """Both sides must have the same names of weights, and of logged numbers in each step."""
    sides = [("trained weights", single.weights, parallel.weights)]
    sides += [
        (f"numbers logged in step {step}", single_logs, parallel_logs)
        for step, (single_logs, parallel_logs) in enumerate(zip(single.logs, parallel.logs, strict=True))
    ]
    for noun, single_names, parallel_names in sides:
        account = Account(noun, single_names)
        account.meet_all(parallel_names)
        if not account.is_complete:
            difference = Difference(
                f"names of {noun}",
                place.rstrip(", ") or "all",
                sorted(single_names),
                sorted(parallel_names),
                math.inf,
                0.0,
            )
            return Divergence((difference,), account.shortfall())
    return None


def _short(place: str, text: str) -> Divergence:
    difference = Difference("what a comparison takes", place.rstrip(", ") or "all", ["a training"], [text], math.inf, 0)
    return Divergence((difference,), text)


def _of_inputs(single: Training, parallel: Training, place: str) -> Divergence | None:
    for step, (expected, seen) in enumerate(zip(single.inputs, parallel.inputs, strict=True)):
        parts = [name for name in sorted({*expected, *seen}) if expected.get(name) != seen.get(name)]
        if parts:
            sampled = any("completion" in name for name in parts)
            same = not any(name.startswith("prompt") and "mask" not in name for name in parts)
            known = [len(set(expected.get(name, ())) & set(seen.get(name, ()))) for name in parts]
            rows = [len(expected.get(name, ())) for name in parts]
            text = [f"{part}: {some} of {all_} rows" for part, some, all_ in zip(parts, known, rows, strict=True)]
            difference = Difference("rows trained on", f"{place}step {step}", rows, text, float("inf"), 0.0)
            return Divergence((difference,), _SAMPLED if sampled and same else _BATCHES)
    return None


def _of_numbers(
    single: Training, parallel: Training, near: list[Training], place: str, tolerance: float | None
) -> list[Difference]:
    expected = _quantities(single, place)
    seen = {(quantity.stage, quantity.where): quantity.values for quantity in _quantities(parallel, place)}
    if not near:
        return differing(expected, seen, tolerance=FLOOR if tolerance is None else tolerance)
    try:
        return differing(expected, seen, [_quantities(neighbour, place) for neighbour in near])
    except NotFinite as error:
        raise AssertionError(
            f"nothing can be told of this training: with each weight changed by one unit in its last place {error}; "
            "take a smaller learning rate, or give a tolerance"
        ) from None
    except ToleranceUnknown as unsteady:
        raise AssertionError(
            f"nothing can be told of this training: {unsteady} by rounding alone; take a smaller learning rate"
        ) from None


def _quantities(training: Training, place: str) -> list[Quantity]:
    import torch

    quantities = []
    for step, logged in enumerate(training.logs):
        for name, stage in (("loss", "loss"), ("grad_norm", "gradient norm")):
            if name in logged:
                value = torch.tensor([logged[name]], dtype=torch.float64)
                rounding = _LOGGED if name == "loss" else 0.0
                quantities.append(Quantity(stage, f"{place}step {step}", value, rounding=rounding))
    last = f"{place}after step {len(training.inputs) - 1}"
    return quantities + [Quantity(f"weight {name}", last, value) for name, value in training.weights.items()]


def _counted(noun: str, place: str, expected: int, seen: int) -> Divergence:
    return Divergence(
        (Difference(f"number of {noun}", place.rstrip(", ") or "all", [expected], [seen], abs(expected - seen), 0.0),)
    )
