"""Whether an exception is a refusal of a setting: raised on purpose, by the library whose argument it is, and in time.

A crash deep in a library that an unchecked argument causes tells its user nothing, and an error in the middle of a
training comes after hours. Runs inside the ranks.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["BEFORE", "EVALUATION", "TRAINING", "is_meant", "phase", "result_without_numbers"]

BEFORE, EVALUATION, TRAINING = "before the training", "in an evaluation", "in the training"
"""When an exception was raised: while config and trainer were built, in ``evaluate()``, or in ``train()``."""
_LIBRARIES = re.compile(r".*/(trl|transformers|accelerate|deepspeed|peft|pytest_trlcompat/trainers)/.+")
_LOOPS = re.compile(r".*/(trl|transformers)/.+")
_MISSING = re.compile(r"__init__\(\) missing \d+ required .*argument")
"""Python's message where a required argument is missing."""
_LOOKING_UP = ("__getattr__", "__getattribute__", "__getitem__")
"""Functions that raise because a lookup failed: that refuses no argument of the user's."""


def is_meant(error: BaseException) -> bool:
    """Whether the exception was raised on purpose.

    It is where a ``raise`` of its class stands in TRL, Transformers, Accelerate, DeepSpeed, PEFT or a cure, or where a
    required argument is missing; not where an operation failed, or a library raised it that does not know the argument.
    """
    if isinstance(error, TypeError) and _MISSING.search(str(error)):
        return True
    frames = [*traceback.walk_tb(error.__traceback__)]
    if not frames:
        return False
    frame, line = frames[-1]
    code = frame.f_code
    if code.co_name in _LOOKING_UP or not _LIBRARIES.match(code.co_filename):
        return False
    return any(
        first <= line <= last and name in ("", type(error).__name__)
        for first, last, name in _raised(code.co_filename, tuple(linecache.getlines(code.co_filename)))
    )


def phase(error: BaseException) -> str:
    """One of :data:`BEFORE`, :data:`EVALUATION` and :data:`TRAINING`."""
    names = {
        frame.f_code.co_name
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if _LOOPS.match(frame.f_code.co_filename)
    }
    if "train" in names:
        return TRAINING
    return EVALUATION if "evaluate" in names else BEFORE


@functools.lru_cache(maxsize=64)
def _raised(path: str, lines: tuple[str, ...]) -> tuple[tuple[int, int, str], ...]:
    """First and last line of each ``raise`` and ``assert`` of a file, and the class; empty where that is not a name.

    An ``assert`` without a message tells its reader nothing, and is left out.
    """
    statements: list[tuple[int, int, str]] = []
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Assert) and node.msg is not None:
            statements.append((node.lineno, node.end_lineno or node.lineno, "AssertionError"))
        if isinstance(node, ast.Raise) and node.exc is not None:
            statements.append((node.lineno, node.end_lineno or node.lineno, _class(node.exc)))
    return tuple(statements)


def _class(raised: Any) -> str:
    called = raised.func if isinstance(raised, ast.Call) else None
    return called.id if isinstance(called, ast.Name) else ""


def result_without_numbers(setting: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result of a training that ended in an error or had to be refused; ``None``: there are numbers to compare.

    Args:
        training: of :func:`~pytest_trlcompat.conformance.sequential.training`.
    """
    text = training.get("text")
    if setting.get("refused") == "allowed":
        return {"refused_with": text} if text else None
    if setting.get("refused"):
        wrong = [
            difference
            for difference in _wrong_refusals(setting, training)
            if difference["expected"] != difference["found"]
        ]
        return {"compared": 1, "differences": wrong[:1], "refused_with": text}
    return {"failure": text} if text else None


def _wrong_refusals(setting: Mapping[str, Any], training: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each requirement of a refusal, and what there was.

    There must be an error; it names the argument, where the row says which; it is raised on purpose; and it comes
    before a training begins, unless the row allows it later because nothing shows the mistake before.
    """
    text, argument = training.get("text"), str(setting.get("refused_naming") or "")
    latest = {"evaluation": EVALUATION, "training": TRAINING}
    in_time = latest.get(str(setting.get("refused_in")), BEFORE)
    when = str(training.get("phase"))
    requirements: tuple[tuple[str, str, bool], ...] = (
        ("", "an error", bool(text)),
        ("[text]", argument, bool(text) and argument in str(text)),
        ("[raised]", "an error that is raised on purpose", bool(training.get("meant"))),
        ("[when]", in_time, when in (BEFORE, in_time)),
    )
    for stage, required, is_right in requirements:
        seen = {"": "a training", "[when]": f"{when}: {text}"}.get(stage, text)
        yield {
            "stage": f"refusal{stage}",
            "where": "",
            "expected": [required],
            "found": [required if is_right else seen],
        }
