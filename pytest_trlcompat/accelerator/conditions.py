"""In which of three cases a condition in a library's source holds: an NPU, a CUDA GPU, or neither on a CUDA machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

__all__ = ["ALWAYS", "NEVER", "NPU", "OTHER_DEVICES", "UNKNOWN", "Cases", "Kind", "asks_for_npu", "cases", "names_npu"]


class Kind(str, Enum):
    """Who takes a body."""

    NPU = "npu"
    """An NPU, and no CUDA GPU."""
    CUDA = "cuda"
    """A CUDA GPU, and no NPU: the condition lists other devices only."""

    def __str__(self) -> str:
        return self.value


_NPU_NAME = re.compile(r"(?:^|_)npus?(?:_|$)|^Npu[A-Z]", re.IGNORECASE)
_CUDA_NAME = re.compile(
    r"^_?(?:is|has|on)_(?:torch_)?cuda(?:_available|_system|_platform)?$|^(?:pt_|torch_)?cuda_available$"
)
OTHER_DEVICES = (
    "xpu|mlu|musa|hpu|sdaa|mps|xla|tpu|habana(?:_gaudi1)?|neuron(?:core)?|rocm|hip|qaic|supa|klxpu|torch_xla"
)
"""A pattern of the names that other accelerators have in libraries."""
_OTHERS = OTHER_DEVICES
_OTHER_NAME = re.compile(
    rf"^_?(?:is_|pt_)?(?:torch_)?(?:{_OTHERS})_available$|^torch\.(?:backends\.)?(?:{_OTHERS})\.is_available$"
)
_OTHER_VALUES = frozenset(
    ("xpu", "mlu", "musa", "hpu", "sdaa", "mps", "xla", "tpu", "neuron", "qaic", "rocm", "hip", "supa", "klxpu")
)
_ASKS = re.compile(r"^_?(?:is|has|requires?|skip)_")

# Names of an NPU that differ from those of a CUDA GPU.
_NPU_VALUES = frozenset({"npu", "multi_npu", "hccl", "torch_npu"})
_CUDA_VALUES = frozenset({"cuda", "multi_gpu", "nccl"})

# Functions whose text argument says what the library asks for: a package, an attribute, the start of a device's name.
_LOOKUPS = {"hasattr", "getattr", "find_spec", "_is_package_available", "startswith", "import_module"}

_Truth = bool | None


@dataclass(frozen=True)
class Cases:
    """Whether a condition holds in each of the three cases; ``None`` where that depends on something else."""

    npu: _Truth
    cuda: _Truth
    host: _Truth

    def __invert__(self) -> Cases:
        return self._map(lambda truth: None if truth is None else not truth)

    def _map(self, change: Callable[[_Truth], _Truth]) -> Cases:
        return Cases(change(self.npu), change(self.cuda), change(self.host))

    def __and__(self, other: Cases) -> Cases:
        return Cases(_both(self.npu, other.npu), _both(self.cuda, other.cuda), _both(self.host, other.host))

    def __or__(self, other: Cases) -> Cases:
        return ~(~self & ~other)

    @property
    def kind(self) -> Kind | None:
        """Whose alone a body is that is run where this holds."""
        if self.npu is not False and self.cuda is False:
            return Kind.NPU
        return Kind.CUDA if self.npu is False and self.cuda is not False else None


def _both(left: _Truth, right: _Truth) -> _Truth:
    if left is False or right is False:
        return False
    return True if left and right else None


ALWAYS = Cases(True, True, True)
UNKNOWN = Cases(None, None, None)
NPU = Cases(True, False, False)
_CUDA = Cases(False, True, True)
NEVER = Cases(False, False, False)


def cases(test: ast.AST) -> Cases:
    """In which of the three cases a condition of a library's source holds."""
    if isinstance(test, ast.BoolOp):
        result = cases(test.values[0])
        for value in test.values[1:]:
            result = result & cases(value) if isinstance(test.op, ast.And) else result | cases(value)
        return result
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ~cases(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _of_comparison(test.left, test.ops[0], test.comparators[0])
    if isinstance(test, ast.NamedExpr):
        return cases(test.value)
    if isinstance(test, ast.Call):
        return _of_call(test)
    if isinstance(test, ast.Subscript):
        return cases(test.value)
    return _of_name(_dotted(test))


def _of_call(call: ast.Call) -> Cases:
    values = {value for argument in call.args for value in _values(argument)}
    name = _dotted(call.func)
    if name.split(".")[-1] in _LOOKUPS:
        if "torch_npu" in values or "npu" in values:
            return NPU
        return Cases(False, True, False) if name.endswith(".startswith") and "cuda" in values else UNKNOWN
    return _of_name(name)


def _of_name(name: str) -> Cases:
    """Of a dotted name that is tested, or called and tested."""
    last = name.split(".")[-1]
    if names_npu(name):
        return NPU if last == "is_available" or _NPU_NAME.search(last) else Cases(None, False, False)
    if name.startswith("torch.cuda."):
        # There is such a module in every torch; on an NPU it counts no device.
        known = last == "is_available"
        return _CUDA if known else Cases(False, None, None) if last == "device_count" else UNKNOWN
    if last == "is_cuda":  # of a tensor
        return Cases(False, True, False)
    if _CUDA_NAME.search(last):
        return _CUDA
    return NEVER if _OTHER_NAME.search(last) or _OTHER_NAME.search(name) else UNKNOWN


def _of_comparison(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Cases:
    negated = isinstance(operator, (ast.NotEq, ast.NotIn, ast.IsNot))
    if isinstance(right, ast.Constant) and right.value is None and isinstance(operator, (ast.Is, ast.IsNot, ast.Eq)):
        # ``find_spec("torch_npu") is not None``: a lookup answers None where there is no such device.
        not_none = cases(left)
        return UNKNOWN if not_none == UNKNOWN else (not_none if negated else ~not_none)
    if isinstance(operator, (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)):
        # The constant may stand on either side.
        values = _values(right) or _values(left)
        equal = _of_values(values, _values(left) != set() and isinstance(operator, (ast.In, ast.NotIn)))
        return ~equal if negated else equal
    counts = cases(left)  # torch.npu.device_count() > 1
    more = isinstance(operator, (ast.Gt, ast.GtE))
    return counts & UNKNOWN if more else UNKNOWN


def _of_values(values: set[str], contained: bool) -> Cases:
    """Of a comparison with these values, in each case with the name that the accelerator has there.

    Args:
        contained: it tests whether a value is in something (``"npu" in devices``), not whether it is one of them.
    """
    npu, cuda = bool(values & _NPU_VALUES), bool(values & _CUDA_VALUES)
    others = values - _NPU_VALUES - _CUDA_VALUES - _OTHER_VALUES
    if npu or cuda:
        if "gpu" in values:  # Accelerate's other name for CUDA
            cuda = True
        return Cases(npu, cuda, None if others and not contained else False)
    return NEVER if values and values <= _OTHER_VALUES else UNKNOWN


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


def names_npu(name: str) -> bool:
    """Whether a part of a dotted name names an NPU: ``torch.npu``, ``is_torch_npu_available``."""
    return any(_NPU_NAME.search(part) for part in name.split("."))


def asks_for_npu(function: str) -> bool:
    """Whether a function with this name checks for an NPU, and so runs on every machine."""
    return _ASKS.match(function) is not None
