"""The table of faults, read from the markers of the tests that hold what it says: ``python -m tests.faults`` prints it.

A test that makes something go wrong says what, and what happens then::

    @pytest.mark.fault("A rank is killed by SIGKILL.", "The launch fails, and names the rank and the signal.")

The case of a parametrized test says it by ``pytest.param(..., marks=pytest.mark.fault(...))``. The page of the
documentation has the same table (``docs/_ext/faults_table.py``). Imports no test, so that it needs no stack.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["AREAS", "Fault", "FaultError", "faults_in", "read", "table"]

TESTS = Path(__file__).resolve().parent
AREAS = {
    "launch": "Launches",
    "stack": "Launches with the stack",
    "plugin": "The plugin",
    "accelerator": "The software accelerator",
    "matrix": "Environments, sweeps and reports",
    "bisect": "Bisection",
    "doctor": "The doctor",
    "catalog": "The catalogue",
}
"""The heading of the table for the tests of a folder, in this order."""


class FaultError(ValueError):
    """A marker from which the table cannot be made."""


_NEVER = {"pytest.mark.skip", "pytest.mark.xfail"}


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        what: what goes wrong, a sentence.
        outcome: what happens then, a sentence.
        folder: the folder of the test below ``tests``.
        test: the file below ``tests`` and the function.
    """

    what: str
    outcome: str
    folder: str
    test: str


def read(tests: Path = TESTS) -> list[Fault]:
    """All faults of the tests below ``tests``, in the order of the areas, of the files, and of the tests in a file.

    Raises:
        FaultError: a marker is not that of a test, or does not hold two sentences, or two tests have the same fault.
    """
    found: dict[str, Fault] = {}
    for folder in AREAS:
        for file in sorted((tests / folder).rglob("test_*.py")):
            for fault in faults_in(file.read_text(encoding="utf-8"), file.relative_to(tests)):
                if fault.what in found:
                    raise FaultError(f"{fault.test} and {found[fault.what].test} have the same fault: {fault.what}")
                found[fault.what] = fault
    return list(found.values())


def faults_in(source: str, file: Path) -> list[Fault]:
    """The faults of one module of tests.

    Args:
        source: its text.
        file: its path below ``tests``.

    Raises:
        FaultError: as :func:`read`.
    """
    tree = ast.parse(source)
    found: list[Fault] = []
    placed: set[ast.Call] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            calls = [call for decorator in function.decorator_list for call in _markers(decorator)]
            placed |= set(calls)
            if calls and not _NEVER.isdisjoint(_names(function)):
                raise FaultError(f"{file}:{function.lineno}: {function.name} is always skipped, or expected to fail")
            for call in calls:
                what, outcome = _sentences(call, file)
                found.append(Fault(what, outcome, file.parts[0], f"{file}::{function.name}"))
    for call in _markers(tree):
        if call not in placed:
            raise FaultError(f"{file}:{call.lineno}: the marker `fault` belongs to a test's decorators")
    return found


def _names(function: ast.FunctionDef) -> set[str]:
    """The decorators without their arguments."""
    return {ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in function.decorator_list}


def _markers(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
            yield node


def _sentences(call: ast.Call, file: Path) -> tuple[str, str]:
    texts = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    sentences = [text for text in texts if isinstance(text, str) and re.fullmatch(r"(?s)[A-Z`].*\.", text)]
    if len(sentences) != 2 or len(call.args) != 2 or call.keywords:
        raise FaultError(
            f"{file}:{call.lineno}: the marker `fault` takes two sentences, with a capital letter and a full stop:"
            " what goes wrong, and what happens then"
        )
    return sentences[0], sentences[1]


def table(faults: Sequence[Fault], level: int = 2) -> str:
    """The faults as Markdown, a table for each area.

    Args:
        level: of the headings.
    """
    lines: list[str] = []
    for folder, heading in AREAS.items():
        rows = [fault for fault in faults if fault.folder == folder]
        if rows:
            lines += [f"{'#' * level} {heading}", "", "| Fault | What happens | Test |", "| --- | --- | --- |"]
            lines += [f"| {_cell(fault.what)} | {_cell(fault.outcome)} | `{fault.test}` |" for fault in rows]
            lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    faults = read()
    print(table(faults))
    print(f"{len(faults)} faults")
