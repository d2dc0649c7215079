"""What is compared of a training on the rows of a dataset, in the order in which its steps compute it.

Rows come first, before any loss: each row that reached the model must be one of the expected rows, and in each pass no
more often than there. Then follows what the reference computes from the rows that the trainer had.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import comparison
from pytest_trlcompat.conformance.comparison import (
    ULP,
    Comparison,
    Difference,
    Quantity,
    compare_with_reference,
    stated,
)
from pytest_trlcompat.conformance.supervised.expected import ExpectedTraining
from pytest_trlcompat.conformance.supervised.records import MicroBatchRecord, Recording, Row
from pytest_trlcompat.conformance.training import unrecorded_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "ExpectedRows",
    "compare",
    "exceeds_floor",
    "expected_quantities",
    "parts_recorded",
    "recorded_quantities",
    "rows_differing",
]

ExpectedRows = Mapping[str, "tuple[Sequence[Row], int]"]
"""For each of :func:`parts_recorded`: the rows that its dataset must become, and how many the trainer's has."""


def compare(
    recordings: Sequence[Recording],
    expected: ExpectedTraining,
    near: Sequence[ExpectedTraining],
    transformers: int,
    expected_rows: ExpectedRows,
    only_in_training: frozenset[str],
    compared: Callable[[Row], Row] = dict,
    extra_differences: Iterable[Difference] = (),
    unrecorded: Mapping[str, str] = MappingProxyType({}),
) -> Comparison:
    """Every quantity that differs, the first one first.

    Args:
        near: what is expected with weights changed by one unit in the last place, in several ways; needed only where
            :func:`exceeds_floor`.
        transformers: its major version.
        only_in_training: what an evaluation need not log.
        compared: the part of a recorded row that must be as expected.
        extra_differences: what differs before a model has computed anything, and belongs to no row.
        unrecorded: by stage, why this release does not show it; for
            :func:`~pytest_trlcompat.conformance.comparison.stated`.
    """
    return compare_with_reference(
        _stated(recordings[0], expected, transformers, unrecorded),
        recorded_quantities(recordings),
        [_stated(recordings[0], neighbour, transformers, unrecorded) for neighbour in near],
        [*extra_differences, *rows_differing(recordings, expected_rows, compared), *_updates(recordings[0])],
        [*_best_model(recordings[0], expected), *_missing(recordings[0], expected, only_in_training)],
    )


def exceeds_floor(
    recordings: Sequence[Recording],
    expected: ExpectedTraining,
    transformers: int,
    unrecorded: Mapping[str, str] = MappingProxyType({}),
) -> bool:
    """Whether a quantity is off by so much that :func:`compare` must know what is near."""
    listed = _stated(recordings[0], expected, transformers, unrecorded)
    return comparison.exceeds_floor(listed, recorded_quantities(recordings))


def _stated(
    recording: Recording, expected: ExpectedTraining, transformers: int, unrecorded: Mapping[str, str]
) -> list[Quantity]:
    logging_steps = int(recording.arguments["logging_steps"])
    listed = [*expected_quantities(expected, logging_steps, transformers)]
    return stated(listed, {**unrecorded, **unrecorded_of(recording.steps)})


def expected_quantities(expected: ExpectedTraining, logging_steps: int, transformers: int) -> Iterator[Quantity]:
    """Everything that a recording can show, in the order in which steps compute it."""
    import torch

    from pytest_trlcompat import reference

    logged = 0
    ranks = expected.settings.world_size
    for number, step in enumerate(expected.steps):
        for index, micro_batch in enumerate(step.micro_batches):
            place = f"step {number}, rank {index % ranks}, micro-batch {expected.starts[number] + index // ranks}"
            for name, values in micro_batch.values.items():
                yield Quantity(name, place, values, micro_batch.masks.get(name))
        place = f"step {number}"
        logs = None
        if (number + 1) % logging_steps == 0:
            logs = reference.supervised_logs(
                expected.steps[logged : number + 1], expected.settings, expected.steps[:logged]
            )
            logged = number + 1
            # First, since it is the norm before gradients are clipped.
            yield Quantity("logs[grad_norm]", place, torch.tensor([logs.pop("grad_norm")], dtype=torch.float64))
        for name, gradient in step.clipped_gradients.items():
            yield Quantity(f"gradients[{name}]", place, gradient)
        for name, weight in step.weights.items():
            yield Quantity(f"weights[{name}]", place, weight)
        for name, value in (logs or {}).items():
            yield Quantity(
                f"logs[{name}]",
                place,
                torch.tensor([value], dtype=torch.float64),
                rounding=_rounding(name, logs or {}, expected.settings, transformers),
            )
    for number, evaluation in enumerate(expected.evaluations):
        place = f"evaluation {number}"
        for index, micro_batch in enumerate(evaluation.micro_batches):
            for name, values in micro_batch.values.items():
                where = f"{place}, rank {index % ranks}, batch {index // ranks}"
                yield Quantity(f"evaluated[{name}]", where, values, micro_batch.masks.get(name))
        for kind in ("evaluation", "evaluate()"):
            for name, value in evaluation.logs.items():
                rounding = _of_rewards(name.removeprefix("eval_"), evaluation.logs, expected.settings)
                yield Quantity(f"{kind}[{name}]", place, torch.tensor([value], dtype=torch.float64), rounding=rounding)


def _rounding(name: str, logs: Mapping[str, float], settings: Any, transformers: int) -> float:
    """Transformers rounded the loss to four digits until 5.0."""
    return 1e-4 if name == "loss" and transformers < 5 else _of_rewards(name, logs, settings)


def _of_rewards(name: str, logs: Mapping[str, float], settings: Any) -> float:
    """Two units in the last place of each of the four log-probabilities whose differences, times beta, are rewards.

    Where policy and reference model are equal, rewards are 0 up to this rounding, also with changed weights; rounding
    then decides which of a pair has the larger one. A vision tower is an example: its convolutions are computed in
    another way where a gradient is needed.
    """
    if not name.startswith("rewards/"):
        return 0.0
    logps = [abs(value) for key, value in logs.items() if "logps/" in key]
    rounding = 8 * ULP * max(logps) * float(settings.beta) if logps else 0.0
    if not name.endswith("/accuracies"):
        return rounding
    margins = [abs(value) for key, value in logs.items() if key.endswith("rewards/margins")]
    return 1.0 if margins and max(margins) <= rounding else 0.0


def recorded_quantities(recordings: Sequence[Recording]) -> Mapping[tuple[str, str], torch.Tensor]:
    """The same quantities of a recording, as far as it has them, by stage and place."""
    import torch

    recorded: dict[tuple[str, str], torch.Tensor] = {}
    main = recordings[0]
    for rank, recording in enumerate(recordings):
        starts = (0, *(step.micro_batches for step in recording.steps))
        for step, (start, end) in enumerate(pairwise(starts)):
            for number in range(start, end):
                for name, values in recording.training[number].values.items():
                    recorded[name, f"step {step}, rank {rank}, micro-batch {number}"] = _padded(values)
        counts: Counter[int] = Counter()
        for batch in recording.micro_batches:
            if batch.evaluation is not None:
                where = f"evaluation {batch.evaluation}, rank {rank}, batch {counts[batch.evaluation]}"
                counts[batch.evaluation] += 1
                for name, values in batch.values.items():
                    recorded[f"evaluated[{name}]", where] = _padded(values)
    for number, step_record in enumerate(main.steps):
        for kind, tensors in (("gradients", step_record.gradients or {}), ("weights", step_record.weights)):
            for name, values in tensors.items():
                recorded[f"{kind}[{name}]", f"step {number}"] = values
    logging_steps = int(main.arguments["logging_steps"])
    for number, entry in enumerate(main.logs):
        for name, value in entry.items():
            recorded[f"logs[{name}]", f"step {(number + 1) * logging_steps - 1}"] = torch.tensor(
                [value], dtype=torch.float64
            )
    for kind, entries in (("evaluation", [logs for _, logs in main.evaluations]), ("evaluate()", main.returned)):
        for number, entry in enumerate(entries):
            for name, value in entry.items():
                if isinstance(value, (int, float)):
                    recorded[f"{kind}[{name}]", f"evaluation {number}"] = torch.tensor([value], dtype=torch.float64)
    return recorded


def _padded(rows: Sequence[Any]) -> torch.Tensor:
    import torch

    if not rows or not isinstance(rows[0], (list, tuple)):
        return torch.tensor(rows, dtype=torch.float64)
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


def parts_recorded(recordings: Sequence[Recording]) -> dict[str, list[list[MicroBatchRecord]]]:
    """The micro-batches of each rank in ``training`` and in the first ``evaluation``, where there were any."""
    evaluated = [[batch for batch in recording.micro_batches if batch.evaluation == 0] for recording in recordings]
    parts = {"training": [recording.training for recording in recordings], "evaluation": evaluated}
    return {part: batches for part, batches in parts.items() if any(batches)}


def rows_differing(
    recordings: Sequence[Recording], expected_rows: ExpectedRows, compared: Callable[[Row], Row] = dict
) -> Iterator[Difference]:
    """What differs before a model has computed anything: the number of rows, and the columns of each."""
    main = recordings[0]
    for part, batches in parts_recorded(recordings).items():
        expected, size = expected_rows[part]
        if part in main.sizes and main.sizes[part] != size:
            yield _difference("data[size]", part, size, main.sizes[part])
        for rank, rank_batches in enumerate(batches):
            for number, batch in enumerate(rank_batches):
                for stage, correct, seen in batch.problems:
                    yield Difference(
                        stage, f"{part}, rank {rank}, micro-batch {number}", [correct], [seen], math.inf, 0.0
                    )
        yield from _against(expected, _by_epoch(batches, len(expected), compared), part)
    if main.before_resuming != main.after_resuming:
        places = zip(main.before_resuming, main.after_resuming, strict=False)
        first = next((pair for pair in places if pair[0] != pair[1]), (main.before_resuming, main.after_resuming))
        yield Difference("data[order]", "after resuming", [str(first[0])], [str(first[1])], math.inf, 0.0)
    if len(set(main.fingerprints)) > 1:
        once, *again = main.fingerprints
        yield Difference("data[fingerprint]", "built again", [once], again, math.inf, 0.0)
    for name, (before, after) in main.changed.items():
        yield Difference(f"config[{name}]", "built", [str(before)], [str(after)], math.inf, 0.0)


def _by_epoch(
    batches: Sequence[Sequence[Any]], size: int, compared: Callable[[Row], Row]
) -> Iterator[list[tuple[str, Row]]]:
    """The rows of all ranks with their places, a list for each pass over the dataset."""
    rows: list[tuple[str, Row]] = []
    for number in range(max(map(len, batches))):
        together = [
            (f"rank {rank}, micro-batch {number}, row {place}", compared(row))
            for rank, rank_batches in enumerate(batches)
            for place, row in enumerate(rank_batches[number].rows if number < len(rank_batches) else [])
        ]
        if rows and len(rows) + len(together) > size:
            yield rows
            rows = []
        rows += together
    yield rows


def _against(
    expected: Sequence[Row], epochs: Iterator[list[tuple[str, Row]]], part: str, most: int = 4
) -> Iterator[Difference]:
    shown = 0
    for rows in epochs:
        unused = Counter(map(_key, expected))
        wrong = []
        for where, row in rows:
            if unused[_key(row)]:
                unused[_key(row)] -= 1
            else:
                wrong.append((where, row))
        for where, row in wrong:
            if shown == most:
                return
            shown += 1
            yield from _nearest([dict(key) for key in unused.elements()], expected, row, f"{part}, {where}")


def _nearest(unused: Sequence[Row], expected: Sequence[Row], row: Row, where: str) -> Iterator[Difference]:
    """How a row differs from the most similar of the expected ones."""
    if any(_key(row) == _key(other) for other in expected):
        yield Difference("data[order]", where, ["another row"], [str(dict(row))], math.inf, 0.0)
        return
    if not unused:
        yield Difference("data[size]", where, ["no row"], [str(dict(row))], math.inf, 0.0)
        return
    near = max(unused, key=lambda candidate: _likeness(candidate, row))
    for name in {**near, **row}:
        if near.get(name) != row.get(name):
            yield Difference(f"data[{name}]", where, list(near.get(name, ())), list(row.get(name, ())), math.inf, 0.0)


def _likeness(row: Row, other: Row) -> tuple[int, float]:
    """The number of equal columns, then how similar all columns are."""
    from difflib import SequenceMatcher

    same = sum(row.get(name) == other.get(name) for name in {**row, **other})
    # By default SequenceMatcher leaves frequent tokens out of account in long rows.
    alike = (SequenceMatcher(None, row[name], other[name], autojunk=False).ratio() for name in row if name in other)
    return same, sum(alike)


def _key(row: Row) -> tuple[tuple[str, tuple[float, ...]], ...]:
    return tuple(sorted((name, tuple(values)) for name, values in row.items()))


def _updates(main: Recording) -> Iterator[Difference]:
    """Steps that accumulate other numbers of micro-batches than the config says; an epoch's last may have fewer."""
    accumulated = int(main.arguments["gradient_accumulation_steps"])
    starts = (0, *(step.micro_batches for step in main.steps))
    counts = [end - start for start, end in pairwise(starts)]
    size = int(main.arguments["per_device_train_batch_size"])
    rows = main.sizes.get("training", 0)
    ranks = int(main.arguments.get("world_size", 1))
    of_epoch = -(-rows // (size * ranks)) if rows else 0
    for number, (start, count) in enumerate(zip(starts, counts, strict=False)):
        left_in_epoch = of_epoch - start % of_epoch if of_epoch else accumulated
        if count != min(accumulated, left_in_epoch):
            yield _difference("updates", f"step {number}", min(accumulated, left_in_epoch), count)


def _best_model(main: Recording, expected: ExpectedTraining) -> Iterator[Difference]:
    """``load_best_model_at_end``: final weights must be those with which the loss of evaluation was smallest."""
    import torch

    if not main.final or not expected.evaluations:
        return
    losses = [evaluation.logs["eval_loss"] for evaluation in expected.evaluations]
    best = main.evaluations[losses.index(min(losses))][0]
    if not best:
        return
    weights = main.steps[best - 1].weights
    for name, weight in main.final.items():
        if name in weights and not torch.equal(weight, weights[name]):
            yield Difference(
                f"best_model[{name}]", f"step {best}", [], [], float((weight - weights[name]).abs().max()), 0.0
            )
            return


def _missing(
    recording: Recording, expected: ExpectedTraining, only_in_training: frozenset[str]
) -> Iterator[Difference]:
    """What a training logs and an evaluation does not; a metric of the reference is due where it has a value there."""
    logged = {name for entry in recording.logs for name in entry} - only_in_training
    known = {
        name
        for step in expected.steps
        for micro_batch in step.micro_batches
        for name in (*micro_batch.metrics, *micro_batch.differences)
    }
    for kind, entries in (
        ("evaluation", [logs for _, logs in recording.evaluations]),
        ("evaluate()", recording.returned),
    ):
        for number, entry in enumerate(entries):
            measured = expected.evaluations[number].logs if number < len(expected.evaluations) else {}
            for name in sorted(logged):
                if f"eval_{name}" not in entry and (name not in known or f"eval_{name}" in measured):
                    yield Difference(f"{kind}[eval_{name}]", f"evaluation {number}", [name], [], math.inf, 0.0)


def _difference(stage: str, where: str, expected: float, recorded: float) -> Difference:
    return Difference(stage, where, [expected], [recorded], math.inf, 0.0)
