"""Where the source of a library goes another way on an NPU than on a CUDA GPU.

The software accelerator bears the name of an NPU, so a library takes these ways on it, though nobody with a GPU does:
what fails there says nothing about the library's users. Reads source by ``ast`` and runs none of it; imports only the
standard library.

Each condition is judged for three cases: an NPU, a CUDA GPU, and, on a machine with a CUDA GPU, something that is on
the CPU or not distributed. A body that the first can enter and the second cannot is one of an NPU alone, and the other
way round.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Branch", "Kind", "is_npu_file", "npu_branches"]


class Kind(str, Enum):
    """Who takes a body."""

    NPU = "npu"
    """An NPU, and no CUDA GPU."""
    CUDA = "cuda"
    """A CUDA GPU, and no NPU: the condition lists other devices only."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Branch:
    """Source that is run on one of the two alone.

    Attributes:
        condition: what leads there, as source; of a function or a file its name.
        function: qualified name of the function or class around it; empty in a module's own body.
        line: where the condition stands.
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
    """All such branches of a module, in the order of their lines; one within another of the same kind is part of it.

    Args:
        path: the module's file; one that is for NPUs by its name is a branch as a whole (:func:`is_npu_file`).

    Raises:
        SyntaxError, ValueError: when the source is no Python.
    """
    if path and is_npu_file(path):
        name = path.replace("\\", "/").rpartition("/")[2]
        return [Branch(Kind.NPU, name, "", 1, 1, max(source.count("\n"), 1), "file")]
    if not _WORTH_READING.search(source):
        return []
    scan = _Scan()
    scan.statements(ast.parse(source).body, _ALWAYS)
    return sorted(scan.found, key=lambda branch: (branch.first, -branch.last, branch.line))


def is_npu_file(path: str) -> bool:
    """Whether a module of a library is for NPUs alone, by its name or its folder's below ``site-packages``."""
    inside = re.split(r"site-packages/|dist-packages/", path.replace("\\", "/"))[-1]
    return any(_NPU_PART.search(part.removesuffix(".py")) for part in inside.split("/")[-3:])


_WORTH_READING = re.compile(r"(?<!i)npu|cuda|hccl|nccl|multi_gpu", re.IGNORECASE)
"""Parsing takes long, and few modules name a device."""

_NPU_PART = re.compile(r"(?:^|_)(?:npu|hccl)(?:_|$)")
_NPU_NAME = re.compile(r"(?:^|_)npus?(?:_|$)|^Npu[A-Z]", re.IGNORECASE)
_CUDA_NAME = re.compile(
    r"^_?(?:is|has|on)_(?:torch_)?cuda(?:_available|_system|_platform)?$|^(?:pt_|torch_)?cuda_available$"
)
_OTHERS = "xpu|mlu|musa|hpu|sdaa|mps|xla|tpu|habana(?:_gaudi1)?|neuron(?:core)?|rocm|hip|qaic|supa|klxpu|torch_xla"
_OTHER_NAME = re.compile(
    rf"^_?(?:is_|pt_)?(?:torch_)?(?:{_OTHERS})_available$|^torch\.(?:backends\.)?(?:{_OTHERS})\.is_available$"
)
_OTHER_VALUES = frozenset(
    ("xpu", "mlu", "musa", "hpu", "sdaa", "mps", "xla", "tpu", "neuron", "qaic", "rocm", "hip", "supa", "klxpu")
)
_ASKS = re.compile(r"^_?(?:is|has|requires?|skip)_")
"""Begins the name of a function that asks whether there is an NPU: it is run on every machine."""

# What an NPU is called where a CUDA GPU is called otherwise.
_NPU_VALUES = frozenset({"npu", "multi_npu", "hccl", "torch_npu"})
_CUDA_VALUES = frozenset({"cuda", "multi_gpu", "nccl"})

_LOOKUPS = {"hasattr", "getattr", "find_spec", "_is_package_available", "startswith", "import_module"}

_Truth = bool | None


@dataclass(frozen=True)
class _Cases:
    """Whether a condition holds in each of the three cases; ``None`` where that depends on something else."""

    npu: _Truth
    cuda: _Truth
    host: _Truth

    def __invert__(self) -> _Cases:
        return self._each(lambda truth: None if truth is None else not truth)

    def _each(self, change: Callable[[_Truth], _Truth]) -> _Cases:
        return _Cases(change(self.npu), change(self.cuda), change(self.host))

    def __and__(self, other: _Cases) -> _Cases:
        return _Cases(_both(self.npu, other.npu), _both(self.cuda, other.cuda), _both(self.host, other.host))

    def __or__(self, other: _Cases) -> _Cases:
        return ~(~self & ~other)

    @property
    def kind(self) -> Kind | None:
        """Whose alone a body is that is run where this holds."""
        if self.npu is not False and self.cuda is False:
            return Kind.NPU
        return Kind.CUDA if self.npu is False and self.cuda is not False else None


def _both(one: _Truth, other: _Truth) -> _Truth:
    if one is False or other is False:
        return False
    return True if one and other else None


_ALWAYS = _Cases(True, True, True)
_UNKNOWN = _Cases(None, None, None)
_NPU = _Cases(True, False, False)
_CUDA = _Cases(False, True, True)
_NEITHER = _NEVER = _Cases(False, False, False)


class _Scan:
    """Walks over a module with what is known of each place."""

    def __init__(self) -> None:
        self.found: list[Branch] = []
        self._names: list[str] = []

    def statements(self, body: Sequence[ast.stmt], here: _Cases) -> None:
        """A list of statements that is reached where ``here`` holds."""
        for position, statement in enumerate(body):
            rest = body[position + 1 :]
            if isinstance(statement, ast.If):
                after = self._if(statement, here)
                if rest and after != here:
                    self._report(rest, after, here, "rest", f"after the one of line {statement.lineno}")
                    here = after
            elif _imports_torch_npu(statement):
                if rest:
                    self._report(rest, here & _NPU, here, "import", ast.unparse(statement))
                here = here & _NPU
            elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self._definition(statement, here)
            else:
                self._other(statement, here)

    def _if(self, statement: ast.If, here: _Cases) -> _Cases:
        """Each arm of ``if``, ``elif`` and ``else`` by itself.

        Returns:
            What holds where the statements after it are reached.
        """
        left, after = here, _NEVER
        refused: list[str] = []
        arm: ast.stmt | None = statement
        while isinstance(arm, ast.If):
            test = _cases(arm.test)
            self._expressions(arm.test, left)
            own = [] if (here & test).kind is (left & test).kind else refused
            self._body(arm.body, left & test, here, "body", [*own, _written(arm.test)], arm.test.lineno)
            after = after if _ends(arm.body) else after | (left & test)
            if (here & ~test).kind is not None:
                refused = [*refused, f"not ({_written(arm.test)})"]
            left, line = left & ~test, arm.test.lineno
            rest = arm.orelse
            arm = rest[0] if len(rest) == 1 and isinstance(rest[0], ast.If) else None
        self._body(rest, left, here, "else", refused, line)
        return here if not _ends_somewhere(statement) else after if _ends(rest) else after | left

    def _body(
        self,
        body: Sequence[ast.stmt],
        there: _Cases,
        here: _Cases,
        form: str,
        conditions: Sequence[str],
        line: int,
    ) -> None:
        shared = bool(body) and body[0].lineno == line
        self._report(body, there, here, form, " and ".join(conditions), line=line, shared=shared)
        self.statements(body, there)

    def _definition(self, statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, here: _Cases) -> None:
        for decorator in statement.decorator_list:
            self._expressions(decorator, here)
        self._names.append(statement.name)
        there = here
        if _NPU_NAME.search(statement.name) and not _ASKS.match(statement.name):
            there = here & _NPU
            self._report([statement], there, here, "function", statement.name)
        self.statements(statement.body, there)
        self._names.pop()

    def _other(self, statement: ast.stmt, here: _Cases) -> None:
        """Loops, ``with``, ``try``, ``match``, and the expressions of simple statements."""
        if isinstance(statement, ast.While):
            there = here & _cases(statement.test)
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

    def _expressions(self, expression: ast.AST, here: _Cases) -> None:
        """Conditional expressions, and operands that are evaluated only after others."""
        if isinstance(expression, ast.IfExp):
            test = _cases(expression.test)
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
                there = there & (~_cases(operand) if negated else _cases(operand))
                before.append(f"not ({_written(operand)})" if negated else _written(operand))
            return
        for child in ast.iter_child_nodes(expression):
            self._expressions(child, here)

    def _operand(self, part: ast.expr, there: _Cases, here: _Cases, form: str, condition: str) -> None:
        # A mere test of a device, or a constant, cannot fail: only what calls something is worth a branch.
        calls = any(isinstance(node, ast.Call) for node in ast.walk(part))
        if calls and (form == "expression" or _cases(part) == _UNKNOWN):
            self._report([part], there, here, form, condition, shared=True)
        self._expressions(part, there)

    def _report(
        self,
        body: Sequence[ast.stmt | ast.expr],
        there: _Cases,
        here: _Cases,
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


def _cases(test: ast.AST) -> _Cases:
    """In which of the three cases a condition holds."""
    if isinstance(test, ast.BoolOp):
        result = _cases(test.values[0])
        for value in test.values[1:]:
            result = result & _cases(value) if isinstance(test.op, ast.And) else result | _cases(value)
        return result
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ~_cases(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _of_comparison(test.left, test.ops[0], test.comparators[0])
    if isinstance(test, ast.NamedExpr):
        return _cases(test.value)
    if isinstance(test, ast.Call):
        return _of_call(test)
    if isinstance(test, ast.Subscript):
        return _cases(test.value)
    return _of_name(_dotted(test))


def _of_call(call: ast.Call) -> _Cases:
    given = {value for argument in call.args for value in _values(argument)}
    name = _dotted(call.func)
    if name.split(".")[-1] in _LOOKUPS:
        if "torch_npu" in given or "npu" in given:
            return _NPU
        return _Cases(False, True, False) if name.endswith(".startswith") and "cuda" in given else _UNKNOWN
    return _of_name(name)


def _of_name(name: str) -> _Cases:
    """Of a dotted name that is tested, or called and tested."""
    last = name.split(".")[-1]
    if _mentions_npu(name):
        return _NPU if last == "is_available" or _NPU_NAME.search(last) else _Cases(None, False, False)
    if name.startswith("torch.cuda."):
        # There is such a module in every torch; on an NPU it counts no device.
        known = last == "is_available"
        return _CUDA if known else _Cases(False, None, None) if last == "device_count" else _UNKNOWN
    if last == "is_cuda":  # of a tensor
        return _Cases(False, True, False)
    if _CUDA_NAME.search(last):
        return _CUDA
    return _NEITHER if _OTHER_NAME.search(last) or _OTHER_NAME.search(name) else _UNKNOWN


def _of_comparison(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> _Cases:
    negated = isinstance(operator, (ast.NotEq, ast.NotIn, ast.IsNot))
    if isinstance(right, ast.Constant) and right.value is None and isinstance(operator, (ast.Is, ast.IsNot, ast.Eq)):
        found = _cases(left)
        return _UNKNOWN if found == _UNKNOWN else (found if negated else ~found)
    if isinstance(operator, (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)):
        values = _values(right) or _values(left)
        found = _of_values(values, _values(left) != set() and isinstance(operator, (ast.In, ast.NotIn)))
        return ~found if negated else found
    counts = _cases(left)  # torch.npu.device_count() > 1
    more = isinstance(operator, (ast.Gt, ast.GtE))
    return counts & _UNKNOWN if more else _UNKNOWN


def _of_values(values: set[str], contained: bool) -> _Cases:
    """Of a comparison with these values, in each case with the name that the accelerator has there.

    Args:
        contained: it is asked whether a value is in something (``"npu" in devices``), not whether it is one of them.
    """
    npu, cuda = bool(values & _NPU_VALUES), bool(values & _CUDA_VALUES)
    others = values - _NPU_VALUES - _CUDA_VALUES - _OTHER_VALUES
    if npu or cuda:
        if "gpu" in values:  # Accelerate's other name for CUDA
            cuda = True
        return _Cases(npu, cuda, None if others and not contained else False)
    return _NEITHER if values and values <= _OTHER_VALUES else _UNKNOWN


def _values(expression: ast.AST) -> set[str]:
    """The constants and members of enumerations that something is compared with, without numbers of devices."""
    if isinstance(expression, (ast.Tuple, ast.List, ast.Set)):
        return {value for item in expression.elts for value in _values(item)}
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return {expression.value.lower().partition(":")[0]}
    if isinstance(expression, ast.Call) and _dotted(expression.func) == "torch.device" and expression.args:
        return _values(expression.args[0])
    if isinstance(expression, ast.Attribute):
        if expression.attr == "value":
            return _values(expression.value)
        if expression.attr.isupper():  # DistributedType.MULTI_NPU, RNGType.NPU
            return {expression.attr.lower()}
    if isinstance(expression, ast.Name) and re.match(r"_?CUDA_", expression.id):  # CUDA_DISTRIBUTED_TYPES
        return {"cuda"}
    return set()


def _dotted(expression: ast.AST) -> str:
    """``torch.npu.is_available`` of the expression with this source; ``self.torch`` is torch."""
    parts: list[str] = []
    while isinstance(expression, ast.Attribute):
        parts.append(expression.attr)
        expression = expression.value
    if isinstance(expression, ast.Name):
        parts.append(expression.id)
    parts = [part for part in reversed(parts) if part != "self"]
    return ".".join(parts)


def _mentions_npu(name: str) -> bool:
    return any(_NPU_NAME.search(part) for part in name.split("."))


def _imports_torch_npu(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.level == 0 and (statement.module or "").split(".")[0] == "torch_npu"
    return isinstance(statement, ast.Import) and any(
        alias.name.split(".")[0] == "torch_npu" or alias.name.startswith("torch.npu") for alias in statement.names
    )


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Whether what stands after these statements is never reached from them."""
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
