"""Which quantities of a recorded training differ from what the reference gives, the first one first.

Tolerances are measured: the reference computes the same training with weights that are changed by one unit in the last
place, in three ways, and a quantity may differ :data:`FACTOR` times as far as the most that these change it. Which
quantities a trainer has, and in which order a step makes them, say
:mod:`~pytest_trlcompat.conformance.grpo.quantities` and so on.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""Of the largest number of a quantity; what summing in another order leaves."""
SMALLEST = 0.05
"""Numbers below it are compared as it is: they are sums of larger ones."""
ULP = 2.0**-23
"""The distance of neighbouring numbers, relative to them: at most this, at least half."""
_TOLD = 0.1
"""Of the largest number of a quantity; one that is so far off in the first step cannot be told from a wrong one."""
_FIRST = re.compile(r"(batch|generation|step) 0\b")
_SEEDS = (1, 2, 3)
"""Of changes by rounding."""
_SHOWN = 4
"""How many numbers a difference shows."""
_PUBLISHED = re.compile(r"(logs|evaluation|evaluate\(\))\[")
"""Stages that a trainer itself shows to its user; all others a recording has to find inside it."""
_OF_PARAMETERS = ("gradients[", "weights[")
_OF_TIME = re.compile(r"\[(eval_)?(epoch|step|(.+_)?(time|runtime|per_second))\]$")
"""What is logged of when and how fast, which no reference has."""


class StepCountMismatch(Exception):
    """The trainer did not sample, or did not train on what it sampled, as its arguments say; says what it did."""


class ToleranceUnknown(Exception):
    """The reference does not agree with itself: rounding changes the first step so much that nothing can be told.

    Later steps of a training that diverges may do so.
    """


class NotFinite(ToleranceUnknown):
    """The reference has no finite number with weights changed by rounding where it has one with its own.

    What rounding leaves cannot be told then, and an infinite allowance would pass anything.
    """


@dataclass(frozen=True)
class Quantity:
    """One quantity of a training.

    Attributes:
        stage: of the step, which the first difference names.
        where: which step, generation or micro-batch.
        values: its numbers.
        mask: of a quantity of tokens ``(R, C)``, those that count: what a trainer has beyond a completion's end is no
            number of anything. ``None``: all count.
        rounding: how far it may be off beside, because it is rounded where it is shown.
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
    neighbours: Callable[[], Sequence[Sequence[Quantity]]],
    tolerance: float | None = None,
) -> list[Difference]:
    """Every quantity that differs by more than rounding leaves, in the order of ``expected``.

    One that was not recorded differs too, unless it says why it need not be (:attr:`Quantity.unrecorded`).

    Args:
        recorded: by stage and place.
        neighbours: what is expected with weights changed by one unit in the last place, in several ways; computed
            where :data:`FLOOR` is not enough.
        tolerance: of the largest number of a quantity, in place of what neighbours show, which are then not computed.

    Raises:
        NotFinite: a quantity differs, and with weights changed it is not finite.
        ToleranceUnknown: a quantity of the first step is far off, and so are those with weights changed.
    """
    near: Sequence[Sequence[Quantity]] = []
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
        largest = float(expected_values.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if expected_values.numel() else 0.0
        allowed = (FLOOR if tolerance is None else tolerance) * max(largest, SMALLEST) + quantity.rounding
        if off > allowed and tolerance is None:
            near = near or neighbours()
            spread = max(
                (_apart(expected_values, _aligned(neighbour[number], seen)[0]) for neighbour in near), default=0.0
            )
            if not math.isfinite(spread):
                raise NotFinite(f"{quantity.stage} ({quantity.where}) is not finite, or has another shape")
            allowed += FACTOR * spread
            if _TOLD * max(largest, SMALLEST) < off <= allowed and _FIRST.match(quantity.where):
                raise ToleranceUnknown(
                    f"{quantity.stage} ({quantity.where}) is off by {off:.3g}, and may be by {allowed:.3g}"
                )
        if not off <= allowed:
            differences.append(
                Difference(quantity.stage, quantity.where, *_most_off(expected_values, recorded_values), off, allowed)
            )
    return differences


def _not_recorded(quantity: Quantity) -> Difference:
    values = quantity.values.double().flatten()[:_SHOWN].tolist()
    return Difference(quantity.stage, quantity.where, values, [], math.inf, 0.0)


class Comparison(NamedTuple):
    """A recording held against the reference.

    Attributes:
        differences: the first one first.
        compared: how many of the expected quantities were recorded, and so compared.
        unseen: stages inside the trainer of which a recording found nothing at all, and should have: it may be the
            recording that no longer sees them, so that they are neither right nor the trainer's fault.
        unheld: stages that a trainer logs and that the reference does not have, sorted.
    """

    differences: list[Difference]
    compared: int
    unseen: list[str]
    unheld: list[str]

    def shortfall(self) -> str:
        """Why nothing can be told of a training in which nothing differs; empty where everything was compared."""
        if not self.unseen:
            return ""
        return (
            f"the recording sees nothing of {', '.join(self.unseen[:_SHOWN])}, which are to be compared: mend it, or "
            "state in the trainer's conventions.toml what this release does not show"
        )


def compare_with_reference(
    expected: Sequence[Quantity],
    recorded: Mapping[tuple[str, str], torch.Tensor],
    neighbours: Callable[[], Sequence[Sequence[Quantity]]],
    before: Iterable[Difference] = (),
    after: Iterable[Difference] = (),
) -> Comparison:
    """Everything that differs: what steps need, what they compute (:func:`differing`), and what follows.

    A trained parameter that the reference does not train differs, too.

    Args:
        before: what differs before a model has computed anything.
        after: what differs in the end; what is one of the quantities is not said again.

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
    differences = [
        difference for difference in differing(expected, recorded, neighbours) if difference.stage not in unseen
    ]
    known = {(difference.stage, difference.where) for difference in differences}
    last = [difference for difference in last if (difference.stage, difference.where) not in known]
    compared = sum((quantity.stage, quantity.where) in recorded for quantity in expected)
    unheld = {stage for stage in recorded_stages - stages if _PUBLISHED.match(stage) and not _OF_TIME.search(stage)}
    return Comparison([*first, *differences, *last], compared, unseen, sorted(unheld))


def stated(expected: Iterable[Quantity], unrecorded: Mapping[str, str]) -> list[Quantity]:
    """The quantities, where those that need not be recorded say why.

    Args:
        unrecorded: why, by stage; ``logps[*`` stands for every stage that begins so.
    """
    prefixes = {name[:-1]: why for name, why in unrecorded.items() if name.endswith("*")}

    def reason(stage: str) -> str:
        return unrecorded.get(stage) or next((why for part, why in prefixes.items() if stage.startswith(part)), "")

    return [
        quantity if quantity.unrecorded else replace(quantity, unrecorded=reason(quantity.stage))
        for quantity in expected
    ]


def neighbours(*models: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, ...]]:
    """Copies of models with each weight changed by -1, 0 or 1 unit in its last place; models that are equal stay so.

    Where a training is about to diverge, a single change may by chance change little, hence several.
    """
    for seed in _SEEDS:
        changed = copy.deepcopy(models)
        for model in changed:
            change(model, seed)
        yield changed


def change(model: torch.nn.Module, seed: int) -> None:
    """Change each weight of a model by -1, 0 or 1 unit in its last place."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            units = torch.randint(-1, 2, parameter.shape, generator=generator)
            size = ULP if parameter.dtype is torch.float32 else torch.finfo(parameter.dtype).eps / 2
            parameter.mul_((1 + units * size).to(parameter))


def _aligned(quantity: Quantity, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides in double precision; of tokens those that count, as wide as the wider one."""
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
    """The largest difference; what is no number, or the same infinity, on both sides does not differ.

    The reference has NaN where a metric is by definition a mean of nothing; whoever has no reference looks at both
    sides before (:meth:`pytest_trlcompat.equivalence.recording.Training.shortfall`).
    """
    both = (values.isnan() & others.isnan()) | (values == others)
    off = (values - others).where(~both, 0.0).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(off.max()) if values.numel() else 0.0


def _most_off(expected: torch.Tensor, recorded: torch.Tensor, count: int = _SHOWN) -> tuple[list[float], list[float]]:
    """The numbers that differ most."""
    off = (expected - recorded).abs().nan_to_num(nan=math.inf).flatten()
    places = off.topk(min(count, off.numel())).indices
    return expected.flatten()[places].tolist(), recorded.flatten()[places].tolist()
