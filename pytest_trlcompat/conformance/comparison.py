"""Which quantities of a recorded training differ from what the reference gives, the first one first.

Tolerances are measured. The reference computes the same training three more times, each with weights that are changed
by one unit in the last place; a quantity may differ by :data:`FACTOR` times the largest change that these cause.
:mod:`~pytest_trlcompat.conformance.grpo.quantities` and its likes list the quantities of a trainer, in the order in
which a step computes them.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = [
    "FLOOR",
    "ULP",
    "Comparison",
    "Difference",
    "NotFinite",
    "Quantity",
    "StepCountMismatch",
    "ToleranceUnknown",
    "change",
    "compare_with_reference",
    "differing",
    "neighbours",
    "stated",
]

FACTOR = 30.0
FLOOR = 2e-5
"""Allowed difference, relative to the largest number of a quantity: what summing in another order leaves."""
SMALLEST = 0.05
"""A quantity whose numbers are all smaller is allowed as much as one of this size: they are sums of larger terms."""
ULP = 2.0**-23
"""The distance between neighbouring float32 numbers, relative to them, is at most this and at least half of it."""
_TOLD = 0.1
"""Relative to the largest number of a quantity: where rounding alone may move one so far in the first step, a wrong
value could not be told from rounding."""
_FIRST = re.compile(r"(batch|generation|step) 0\b")
_SEEDS = (1, 2, 3)
"""Seeds of the changes of weights that measure rounding."""
_SHOWN = 4
"""How many numbers a difference shows."""
_PUBLISHED = re.compile(r"(logs|evaluation|evaluate\(\))\[")
"""Stages that a trainer itself shows to its user; a recording has to find all others inside the trainer."""
_OF_PARAMETERS = ("gradients[", "weights[")
_OF_TIME = re.compile(r"\[(eval_)?(epoch|step|(.+_)?(time|runtime|per_second))\]$")
"""Logged times and speeds, which no reference has."""


class StepCountMismatch(Exception):
    """The number of samples or micro-batches is not the one that the arguments ask for; the text says what happened."""


class ToleranceUnknown(Exception):
    """Rounding changes the reference's first step so much that a difference could not be told from it.

    Later steps may change so much, in a training that diverges.
    """


class NotFinite(ToleranceUnknown):
    """A number of the reference is no longer finite once weights are changed by rounding.

    Rounding cannot be measured then, and an infinite tolerance would pass anything.
    """


@dataclass(frozen=True)
class Quantity:
    """One quantity of a training.

    Attributes:
        stage: what it is, such as ``logs[loss]``: by this name known issues explain a difference.
        where: which step, generation or micro-batch.
        values: its numbers.
        mask: of a quantity of tokens ``(R, C)``, those that are compared: numbers beyond a completion's end mean
            nothing. ``None``: all are compared.
        rounding: how far it may be off in addition, because it is rounded where it is shown.
        unrecorded: why a recording need not have it; empty: it must.
    """

    stage: str
    where: str
    values: torch.Tensor
    mask: torch.Tensor | None = None
    rounding: float = 0.0
    unrecorded: str = ""


@dataclass(frozen=True)
class Difference:
    """
    Attributes:
        found: empty where nothing was recorded.
        off: largest difference; ``allowed``: what rounding may leave.
    """

    stage: str
    where: str
    expected: list[Any]
    found: list[Any]
    off: float
    allowed: float

    def describe(self) -> str:
        recorded = self.found if self.found or not self.expected else "nothing recorded"
        return f"{self.stage} ({self.where}): {recorded} instead of {self.expected}"


def differing(
    expected: Sequence[Quantity],
    recorded: Mapping[tuple[str, str], torch.Tensor],
    near: Sequence[Sequence[Quantity]] = (),
    tolerance: float | None = None,
) -> list[Difference]:
    """Every quantity that differs by more than rounding explains, in the order of ``expected``.

    One that was not recorded differs too, unless it says why it need not be (:attr:`Quantity.unrecorded`).

    Args:
        recorded: by stage and place.
        near: what is expected with weights changed by one unit in the last place, in several ways; needed only where
            :func:`exceeds_floor`.
        tolerance: relative to the largest number of a quantity, in place of :data:`FLOOR` and of what is near.

    Raises:
        NotFinite: a quantity differs, and it is not finite with changed weights.
        ToleranceUnknown: a quantity of the first step is far off, and changed weights move it as far.
    """
    differences: list[Difference] = []
    for number, quantity in enumerate(expected):
        seen = recorded.get((quantity.stage, quantity.where))
        if seen is None:
            if not quantity.unrecorded:
                differences.append(_not_recorded(quantity))
            continue
        expected_values, recorded_values = _aligned(quantity, seen)
        if expected_values.shape != recorded_values.shape:
            shapes = _shape(expected_values), _shape(recorded_values)
            differences.append(Difference(quantity.stage, quantity.where, *shapes, math.inf, 0.0))
            continue
        off = _apart(expected_values, recorded_values)
        largest = _largest(expected_values)
        allowed = (FLOOR if tolerance is None else tolerance) * largest + quantity.rounding
        if off > allowed and tolerance is None:
            spread = max(
                (_apart(expected_values, _aligned(neighbour[number], seen)[0]) for neighbour in near), default=0.0
            )
            if not math.isfinite(spread):
                raise NotFinite(f"{quantity.stage} ({quantity.where}) is not finite, or has another shape")
            allowed += FACTOR * spread
            if _TOLD * largest < off <= allowed and _FIRST.match(quantity.where):
                raise ToleranceUnknown(
                    f"{quantity.stage} ({quantity.where}) is off by {off:.3g}, and may be by {allowed:.3g}"
                )
        # So written that NaN is a difference.
        if not off <= allowed:
            differences.append(
                Difference(quantity.stage, quantity.where, *_most_off(expected_values, recorded_values), off, allowed)
            )
    return differences


def exceeds_floor(expected: Sequence[Quantity], recorded: Mapping[tuple[str, str], torch.Tensor]) -> bool:
    """Whether a quantity is off by more than :data:`FLOOR`, so that what is near must be known.

    That costs as many trainings as :func:`neighbours` has members, and most recordings do not need it.
    """
    for quantity in expected:
        seen = recorded.get((quantity.stage, quantity.where))
        if seen is not None:
            values, recorded_values = _aligned(quantity, seen)
            if values.shape == recorded_values.shape:
                allowed = FLOOR * _largest(values) + quantity.rounding
                if _apart(values, recorded_values) > allowed:
                    return True
    return False


def _largest(values: torch.Tensor) -> float:
    """The largest number, to which a tolerance is relative, or :data:`SMALLEST`."""
    # NaN and infinities must not widen the tolerance of the other numbers.
    return max(float(values.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if values.numel() else 0.0, SMALLEST)


def _not_recorded(quantity: Quantity) -> Difference:
    values = quantity.values.double().flatten()[:_SHOWN].tolist()
    return Difference(quantity.stage, quantity.where, values, [], math.inf, 0.0)


class Comparison(NamedTuple):
    """The result of comparing a recording with the reference.

    Attributes:
        differences: the first one first.
        compared: how many of the expected quantities were recorded, and so compared.
        unseen: stages inside the trainer of which the recording has nothing, though it should. Perhaps only the
            recording no longer sees them, so they count neither as right nor as the trainer's fault.
        without_reference: stages that a trainer logs and that the reference does not have, sorted.
    """

    differences: list[Difference]
    compared: int
    unseen: list[str]
    without_reference: list[str]

    def shortfall(self) -> str:
        """Why a training without differences cannot be called right; empty where everything was compared."""
        if not self.unseen:
            return ""
        return (
            f"the recording sees nothing of {', '.join(self.unseen[:_SHOWN])}, which are to be compared: mend it, or "
            "state in the trainer's conventions.toml what this release does not show"
        )


def compare_with_reference(
    expected: Sequence[Quantity],
    recorded: Mapping[tuple[str, str], torch.Tensor],
    near: Sequence[Sequence[Quantity]] = (),
    before: Iterable[Difference] = (),
    after: Iterable[Difference] = (),
) -> Comparison:
    """Everything that differs: what precedes the steps, what they compute (:func:`differing`), and what follows them.

    A parameter that is trained, and that the reference does not train, differs too.

    Args:
        near: as of :func:`differing`.
        before: what differs before a model has computed anything.
        after: what differs in the end; a quantity that is reported already is left out.

    Raises:
        NotFinite, ToleranceUnknown: as of :func:`differing`.
    """
    first = list(before)
    stages = {quantity.stage for quantity in expected}
    recorded_stages = {stage for stage, _ in recorded}
    due = dict.fromkeys(quantity.stage for quantity in expected if not quantity.unrecorded)
    # A recording that sees one parameter sees all that are trained: one that is missing is not trained.
    read = tuple(part for part in _OF_PARAMETERS if any(stage.startswith(part) for stage in recorded_stages))
    unseen = [
        stage
        for stage in due
        if stage not in recorded_stages and not (_PUBLISHED.match(stage) or stage.startswith(read))
    ]
    trained = [key for key in recorded if key[0].startswith(_OF_PARAMETERS) and key[0] not in stages]
    last = [Difference(*key, [], recorded[key].double().flatten()[:_SHOWN].tolist(), math.inf, 0.0) for key in trained]
    last += after
    differences = [difference for difference in differing(expected, recorded, near) if difference.stage not in unseen]
    known = {(difference.stage, difference.where) for difference in differences}
    last = [difference for difference in last if (difference.stage, difference.where) not in known]
    compared = sum((quantity.stage, quantity.where) in recorded for quantity in expected)
    without_reference = {
        stage for stage in recorded_stages - stages if _PUBLISHED.match(stage) and not _OF_TIME.search(stage)
    }
    return Comparison([*first, *differences, *last], compared, unseen, sorted(without_reference))


def stated(expected: Iterable[Quantity], unrecorded: Mapping[str, str]) -> list[Quantity]:
    """The quantities, with the reason on those that need not be recorded.

    Args:
        unrecorded: the reason by stage; ``logps[*`` stands for every stage that begins so.
    """
    prefixes = {name[:-1]: why for name, why in unrecorded.items() if name.endswith("*")}

    def reason(stage: str) -> str:
        return unrecorded.get(stage) or next((why for part, why in prefixes.items() if stage.startswith(part)), "")

    return [
        quantity if quantity.unrecorded else replace(quantity, unrecorded=reason(quantity.stage))
        for quantity in expected
    ]


def neighbours(*models: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, ...]]:
    """Copies of models with each weight changed by -1, 0 or 1 unit in its last place; equal models stay equal.

    There are several, since a single change may by chance have little effect in a training that is about to diverge.
    """
    for seed in _SEEDS:
        changed = copy.deepcopy(models)
        for model in changed:
            change(model, seed)
        yield changed


def change(model: torch.nn.Module, seed: int) -> None:
    """Change each weight of a model by -1, 0 or 1 unit in its last place; in 16 bits by -1 or 0."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            units = torch.randint(-1, 2, parameter.shape, generator=generator)
            # In 16 bits 1 + eps / 2 rounds to 1, so that weights are only made smaller there. With a unit in either
            # direction, the accuracy of ORPO's near ties in bfloat16 had no tolerance, and rounding was a fault.
            size = ULP if parameter.dtype is torch.float32 else torch.finfo(parameter.dtype).eps / 2
            parameter.mul_((1 + units * size).to(parameter))


def _aligned(quantity: Quantity, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected and recorded values in double precision; of tokens only those that count, padded to the same width."""
    import torch

    expected, recorded = quantity.values.double(), seen.double()
    if quantity.mask is None:
        return expected, recorded
    width = max(expected.shape[1], recorded.shape[1])
    mask, expected, recorded = (
        torch.nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in (quantity.mask, expected, recorded)
    )
    if recorded.shape != expected.shape:
        return expected, recorded
    return expected.where(mask, 0.0), recorded.where(mask, 0.0)


def _shape(values: torch.Tensor) -> list[float]:
    return [*map(float, values.shape)]


def _apart(values: torch.Tensor, others: torch.Tensor) -> float:
    """The largest difference; NaN on both sides, or the same infinity, is no difference.

    The reference has NaN where a metric is by definition a mean of nothing. A caller without the reference must look
    for NaN first (:meth:`pytest_trlcompat.equivalence.recording.Training.shortfall`).
    """
    both = (values.isnan() & others.isnan()) | (values == others)
    off = (values - others).where(~both, 0.0).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(off.max()) if values.numel() else 0.0


def _most_off(expected: torch.Tensor, recorded: torch.Tensor, count: int = _SHOWN) -> tuple[list[float], list[float]]:
    """The numbers that differ most."""
    off = (expected - recorded).abs().nan_to_num(nan=math.inf).flatten()
    places = off.topk(min(count, off.numel())).indices
    return expected.flatten()[places].tolist(), recorded.flatten()[places].tolist()
