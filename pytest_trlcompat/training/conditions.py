"""Conditions on a training, as a catalogue writes them, and whether they hold.

A condition is a table of axes and what each must have, or a list of such tables, of which one must hold::

    { gradient_checkpointing = true, "adapter.type" = { given = true } }

A value alone must be the same; a list has the values of which one must be the same; a table has one of :data:`TESTS`.
A name without a point is an argument's. Imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytest_trlcompat.training.answers import Answer, Bite, all_of, any_of
from pytest_trlcompat.training.axes import axis_named, look_at
from pytest_trlcompat.training.training import DEFAULT, UNKNOWN, Training, full_name

__all__ = ["TESTS", "Condition", "ConditionError", "Defaults", "check", "evaluate", "no_defaults", "same"]

Condition = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""As it is written, see the module."""
Defaults = Callable[[str], Any]
"""The default of an argument in the release in question, or :data:`~pytest_trlcompat.training.training.UNKNOWN`."""
_SIZES = (bool, int, float)


class ConditionError(ValueError):
    """A condition that means nothing; the text says which part."""


def no_defaults(name: str) -> Any:
    """For where no default is known."""
    return UNKNOWN


def same(value: Any, expected: Any) -> bool:
    """Whether two values are the same: of numbers their value, of truths never a number, of words no case."""
    # In Python True equals 1.
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, str) and isinstance(expected, str):
        return value.casefold() == expected.casefold()
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, (list, tuple)) and len(value) == 1 and not isinstance(expected, (list, tuple)):
        return same(value[0], expected)  # loss_type of DPO, which may be a list
    return bool(value == expected)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, _SIZES) else float("nan")  # neither above nor below anything


def _like(value: Any, measured: Any) -> bool | None:
    """Numbers on the same side of 0 and of 1 act alike often, not always: ``None``."""
    if same(value, measured):
        return True
    if isinstance(value, bool) or isinstance(measured, bool) or not isinstance(value, _SIZES):
        return False
    if not isinstance(measured, _SIZES):
        return False
    alike = [(value > bound) - (value < bound) == (measured > bound) - (measured < bound) for bound in (0, 1)]
    return None if all(alike) else False


TESTS: Mapping[str, Callable[[Any, Any], bool | None]] = {
    "not": lambda value, expected: not _is_one_of(value, expected),
    "at_least": lambda value, least: _number(value) >= least,
    "at_most": lambda value, most: _number(value) <= most,
    "above": lambda value, bound: _number(value) > bound,
    "below": lambda value, bound: _number(value) < bound,
    "given": lambda value, given: (value not in (None, "", False, [], {})) is given,
    "like": _like,
    "has": lambda value, name: name in value if isinstance(value, (list, dict, str)) else False,
}
"""What a table of one key may ask of a value; ``None`` is that it cannot be told."""


def check(condition: Condition) -> None:
    """
    Raises:
        ConditionError: an axis that there is not, or a test that there is not.
    """
    tables: object = [condition] if isinstance(condition, Mapping) else condition
    if not isinstance(tables, (list, tuple)):
        raise ConditionError(f"a condition is a table of axes or a list of such tables, not {condition!r}")
    if not tables:
        raise ConditionError("a list of conditions without one never holds; leave it out")
    for table in tables:
        if not isinstance(table, Mapping):
            raise ConditionError(f"a condition is a table of axes and values, not {table!r}")
        for axis, expected in table.items():
            if axis_named(full_name(axis)) is None:
                raise ConditionError(f"{axis!r} is no axis of a training")
            if isinstance(expected, Mapping):
                _test_of(axis, expected)
            elif isinstance(expected, list) and not expected:
                raise ConditionError(f"{axis}: an empty list of values never holds")


def _test_of(axis: str, table: Mapping[str, Any]) -> tuple[str, Any]:
    if len(table) != 1 or not set(table) <= set(TESTS):
        raise ConditionError(f"{axis}: one of {', '.join(TESTS)} was expected, {', '.join(table) or 'none'} was found")
    return next(iter(table.items()))


def evaluate(condition: Condition, training: Training, defaults: Defaults = no_defaults) -> Answer:
    """Whether a condition holds of a training; an empty table holds of any.

    Raises:
        ConditionError: as :func:`check`.
    """
    tables = [condition] if isinstance(condition, Mapping) else condition
    return any_of(
        all_of(_of_axis(axis, expected, training, defaults) for axis, expected in table.items()) for table in tables
    )


def _of_axis(axis: str, expected: Any, training: Training, defaults: Defaults) -> Answer:
    name = full_name(axis)
    value, shown = training.value(name), ""
    if value is DEFAULT:
        value, shown = defaults(name.partition(".")[2]), " by default"
    if value is UNKNOWN:
        return Answer(Bite.CANNOT_TELL, look=(look_at(name, expected),))
    operand = expected
    holds: bool | None
    if isinstance(expected, Mapping):
        test, operand = _test_of(axis, expected)
        holds = TESTS[test](value, operand)
    else:
        holds = _is_one_of(value, expected)
    short = name.removeprefix("arguments.")
    if holds is None:
        return Answer(Bite.CANNOT_TELL, look=(f"{short}={value!r}{shown} where {operand!r} was measured",))
    return Answer(Bite.BITES if holds else Bite.DOES_NOT, because=(f"{short}={value!r}{shown}",))


def _is_one_of(value: Any, expected: Any) -> bool:
    choices = expected if isinstance(expected, list) else [expected]
    return any(same(value, choice) for choice in choices)
