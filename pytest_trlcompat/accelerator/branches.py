"""Where the source of a library goes another way on an NPU than on a CUDA GPU.

The software accelerator bears the name of an NPU, so a library takes these branches on it, though no GPU does. What
fails there says nothing about the library's users. The source is read by ``ast``; none of it is run.

Each condition is judged for three cases: an NPU, a CUDA GPU, and, on a machine with a CUDA GPU, something that is on
the CPU or not distributed. A body belongs to an NPU alone if an NPU can enter it and a CUDA GPU cannot, and the other
way round.
"""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_trlcompat.accelerator.conditions import (
    ALWAYS,
    NEVER,
    NPU,
    OTHER_DEVICES,
    UNKNOWN,
    Cases,
    Kind,
    asks_for_npu,
    cases,
    names_npu,
)

__all__ = ["Branch", "Kind", "is_npu_file", "npu_branches"]


@dataclass(frozen=True)
class Branch:
    """Source that runs only on an NPU, or only on a CUDA GPU.

    Attributes:
        condition: what leads there, as source; of a function or a file its name.
        function: qualified name of the function or class around it; empty in a module's own body.
        line: the line of the condition.
        first, last: the lines of the body, from 1 on, both included.
        form: ``body`` (of ``if``, ``elif`` or ``while``), ``else``, ``rest`` (what comes after a body that always
            leaves, ``if not is_npu_available(): return``), ``operand`` (of ``and``, ``or``), ``expression`` (of ``a if
            b else c``), ``import`` (what comes after ``import torch_npu``), ``function`` (one for NPUs by its name) or
            ``file``.
        certain: nothing on a machine with CUDA comes here (of ``Kind.CUDA``: nothing on one with an NPU). It does not
            hold of the ``else`` of ``device.type == "cuda"``, where a tensor on the CPU goes too.
        shared: its lines hold code that others run as well, as those of a conditional expression may.
    """

    kind: Kind
    condition: str
    function: str
    line: int
    first: int
    last: int
    form: str
    certain: bool = True
    shared: bool = False

    def __contains__(self, line: int) -> bool:
        return self.first <= line <= self.last


def npu_branches(source: str, path: str = "") -> list[Branch]:
    """All such branches of a module, in the order of their lines.

    A branch within another of the same kind is part of that one.

    Args:
        path: the module's file. A file that is for NPUs by its name is one branch as a whole (:func:`is_npu_file`).

    Raises:
        SyntaxError, ValueError: the source is not Python.
    """
    if path and is_npu_file(path):
        name = path.replace("\\", "/").rpartition("/")[2]
        return [Branch(Kind.NPU, name, "", 1, 1, max(source.count("\n"), 1), "file")]
    lowered = source.lower()
    if not any(word in lowered for word in _WORTH_READING) or not _names_a_device(lowered):
        return []
    scan = _Scan(lowered)
    scan.statements(ast.parse(source).body, ALWAYS)
    return sorted(scan.found, key=lambda branch: (branch.first, -branch.last, branch.line))


def is_npu_file(path: str) -> bool:
    """Whether a module of a library is for NPUs alone, by its name or its folder's below ``site-packages``."""
    inside = re.split(r"site-packages/|dist-packages/", path.replace("\\", "/"))[-1]
    return any(_NPU_PART.search(part.removesuffix(".py")) for part in inside.split("/")[-3:])


_WORTH_READING = ("npu", "cuda", "hccl", "nccl", "multi_gpu")
"""Parsing takes long, and few modules name a device. Searched one by one, which is faster than one pattern of them."""

_NPU = re.compile(r"(?<!i)npu")
"""Not that of ``input``."""


def _names_a_device(lowered: str) -> bool:
    return any(word in lowered for word in _WORTH_READING[1:]) or _NPU.search(lowered) is not None


_DEVICE_WORD = re.compile(rf"npu|cuda|hccl|nccl|gpu|{OTHER_DEVICES}")
"""Whatever makes :func:`cases` answer otherwise than ``UNKNOWN`` has one of these; most that have one do not."""

_NPU_PART = re.compile(r"(?:^|_)(?:npu|hccl)(?:_|$)")


class _Scan:
    """Walks over a module with what is known at each statement."""

    def __init__(self, lowered: str) -> None:
        """
        Args:
            lowered: the module's source in lower case.
        """
        self.found: list[Branch] = []
        self._names: list[str] = []
        breaks = [newline.start() for newline in re.finditer("\n", lowered)]
        self._lines = sorted({bisect.bisect_left(breaks, word.start()) + 1 for word in _DEVICE_WORD.finditer(lowered)})

    def _names_none(self, node: ast.AST) -> bool:
        """Whether no line of a node names a device: then its conditions say nothing, and nothing within is a branch.

        Most of a library's source is of this kind, and walking over it takes most of the time.
        """
        first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
        if first is None or last is None:
            return False
        # The line of a definition is that of its def; decorators stand above.
        first = min([first, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        position = bisect.bisect_left(self._lines, first)
        return position == len(self._lines) or self._lines[position] > last

    def statements(self, body: Sequence[ast.stmt], here: Cases) -> None:
        """A list of statements that is reached where ``here`` holds."""
        for position, statement in enumerate(body):
            if self._names_none(statement):
                continue
            rest = body[position + 1 :]
            if isinstance(statement, ast.If):
                after = self._if(statement, here)
                if rest and after != here:
                    refused = f"not ({_written(statement.test)})"
                    self._report(rest, after, here, "rest", refused if _ends(statement.body) else "the rest of a chain")
                    here = after
            elif _imports_torch_npu(statement):
                if rest:
                    # Without an NPU the import raises, and nothing after it is reached.
                    self._report(rest, here & NPU, here, "import", ast.unparse(statement))
                here = here & NPU
            elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self._definition(statement, here)
            else:
                self._other(statement, here)

    def _if(self, statement: ast.If, here: Cases) -> Cases:
        """Each arm of ``if``, ``elif`` and ``else`` by itself.

        Returns:
            What holds where the statements after it are reached.
        """
        left, after = here, NEVER
        refused: list[str] = []
        arm: ast.stmt | None = statement
        while isinstance(arm, ast.If):
            test = cases(arm.test)
            self._expressions(arm.test, left)
            # The refused conditions belong to the text only where this one alone does not tell whose the arm is.
            earlier = [] if (here & test).kind is (left & test).kind else refused
            self._body(arm.body, left & test, here, "body", [*earlier, _written(arm.test)], arm.test.lineno)
            after = after if _ends(arm.body) else after | (left & test)
            if (here & ~test).kind is not None:
                refused = [*refused, f"not ({_written(arm.test)})"]
            left, line = left & ~test, arm.test.lineno
            rest = arm.orelse
            arm = rest[0] if len(rest) == 1 and isinstance(rest[0], ast.If) else None
        self._body(rest, left, here, "else", refused, line)
        # Where no arm leaves, the statements after the chain are reached as the chain itself was.
        return here if not _ends_somewhere(statement) else after if _ends(rest) else after | left

    def _body(
        self,
        body: Sequence[ast.stmt],
        there: Cases,
        here: Cases,
        form: str,
        conditions: Sequence[str],
        line: int,
    ) -> None:
        # In ``if a: b`` on one line, the line of a failure does not tell which of the two raised.
        shared = bool(body) and body[0].lineno == line
        self._report(body, there, here, form, " and ".join(conditions), line=line, shared=shared)
        self.statements(body, there)

    def _definition(self, statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, here: Cases) -> None:
        for decorator in statement.decorator_list:
            self._expressions(decorator, here)
        self._names.append(statement.name)
        there = here
        if names_npu(statement.name) and not asks_for_npu(statement.name):
            there = here & NPU
            self._report([statement], there, here, "function", statement.name)
        self.statements(statement.body, there)
        self._names.pop()

    def _other(self, statement: ast.stmt, here: Cases) -> None:
        """Loops, ``with``, ``try``, ``match``, and the expressions of simple statements."""
        if isinstance(statement, ast.While):
            there = here & cases(statement.test)
            self._body(statement.body, there, here, "body", [_written(statement.test)], statement.test.lineno)
            self._expressions(statement.test, here)
            self.statements(statement.orelse, here)
            return
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.expr):
                self._expressions(child, here)
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                self.statements(child.body, here)
        for name in ("body", "orelse", "finalbody"):
            self.statements(getattr(statement, name, []), here)

    def _expressions(self, expression: ast.AST, here: Cases) -> None:
        """Conditional expressions, and operands that are evaluated only after others."""
        if self._names_none(expression):
            return
        if isinstance(expression, ast.IfExp):
            test = cases(expression.test)
            written = _written(expression.test)
            self._operand(expression.body, here & test, here, "expression", written)
            self._operand(expression.orelse, here & ~test, here, "expression", f"not ({written})")
            self._expressions(expression.test, here)
            return
        if isinstance(expression, ast.BoolOp):
            there = here
            before: list[str] = []
            for operand in expression.values:
                self._operand(operand, there, here, "operand", " and ".join(before))
                negated = isinstance(expression.op, ast.Or)
                there = there & (~cases(operand) if negated else cases(operand))
                before.append(f"not ({_written(operand)})" if negated else _written(operand))
            return
        for child in ast.iter_child_nodes(expression):
            self._expressions(child, here)

    def _operand(self, part: ast.expr, there: Cases, here: Cases, form: str, condition: str) -> None:
        # A mere test of a device, or a constant, cannot fail: only what calls something is worth a branch.
        calls = any(isinstance(node, ast.Call) for node in ast.walk(part))
        if calls and (form == "expression" or cases(part) == UNKNOWN):
            self._report([part], there, here, form, condition, shared=True)
        self._expressions(part, there)

    def _report(
        self,
        body: Sequence[ast.stmt | ast.expr],
        there: Cases,
        here: Cases,
        form: str,
        condition: str,
        *,
        line: int | None = None,
        shared: bool = False,
    ) -> None:
        kind = there.kind
        if kind is None or kind is here.kind or not body:
            return
        first = min(node.lineno for node in [body[0], *getattr(body[0], "decorator_list", [])])
        last = body[-1].end_lineno or body[-1].lineno
        certain = there.host is False if kind is Kind.NPU else True
        name = ".".join(self._names)
        self.found.append(Branch(kind, condition, name, line or first, first, last, form, certain, shared))


def _imports_torch_npu(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.level == 0 and (statement.module or "").split(".")[0] == "torch_npu"
    return isinstance(statement, ast.Import) and any(
        alias.name.split(".")[0] == "torch_npu" or alias.name.startswith("torch.npu") for alias in statement.names
    )


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Whether the code after these statements is never reached from them."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.If):
        return _ends(last.body) and _ends(last.orelse)
    return isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _ends_somewhere(statement: ast.If) -> bool:
    """Whether an arm of a chain always leaves."""
    rest = statement.orelse
    chained = len(rest) == 1 and isinstance(rest[0], ast.If)
    return _ends(statement.body) or (_ends_somewhere(rest[0]) if chained else _ends(rest))  # type: ignore[arg-type]


def _written(test: ast.AST) -> str:
    text = ast.unparse(test)
    return text if len(text) <= 160 else text[:157] + "..."
